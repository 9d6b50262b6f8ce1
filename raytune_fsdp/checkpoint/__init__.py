"""What is saved, and how it becomes visible: a checkpoint is either complete, verified and visible, or not there.

docs/checkpoint-format.md describes the files, docs/design/checkpoints.md and docs/design/saves.md give the reasons.

In the order of a save:

    saver.py           begins the saves of an attempt, one at a time, and says whether older ones may go afterwards
    contents.py        the tensors to save, by name
    state.py           everything else, as JSON
    room.py            whether the nodes have memory for that, and storage room for a recovery point
    by_clock.py        when a recovery point is due
    save_in_flight.py  the life of one save: begun, written, committed or failed, reported
    messages.py        what the ranks' writers tell each other meanwhile
    writing.py         which rank writes which piece, and the index that says so; a copy of a rank's pieces, and its
                       file, hashed as it is written
    storage.py         the interface of a storage, and a file system; objects.py: an object store; location.py chooses
    manifest.py        size and hash of every file, written last
    peers/             copies in the memory of the nodes, between two checkpoints

Afterwards:

    index.py           which file has which piece, and where: read and checked
    catalogue.py       which checkpoints a run has and can trust, and the rule by which it keeps them
    reading.py         the tensors of a committed checkpoint, verified and loaded by all ranks together
    weights.py         a checkpoint as a source of weights: to generate, export, or begin another run
    merged.py          all weights of its network, whatever it holds of them
    model_files.py     the config and tokenizer that belong to a checkpoint; a model for inference, on one device or
                       on all
    form.py            as which network a checkpoint of a model that also sees is exported
    on_demand.py       how somebody asks a training run for a checkpoint now, or to stop
"""
