"""What is saved, and how it becomes visible: a checkpoint is complete, verified and there, or it is not there.

docs/checkpoint-format.md has the files, docs/architecture.md the reasons. In the order of a save:

    store.py     begin a save, ask what became of it, load          tensors.py   the tensors, by name
    staging.py   a copy of this rank's part in host memory          state.py     everything that is not a tensor
    flight.py    the writers of one save                            layout.py    who writes which piece; the index
    meeting.py   what the writers tell each other                   writing.py   a rank's file, hashed as it is written
    storage.py   where checkpoints lie; posix.py, objects.py        manifest.py  what the files must be
    commit.py    which there are, can be trusted, are kept          reading.py   the tensors of a committed one
    weights.py   a checkpoint as a source of weights                export.py    and as a model again
"""
