"""A run as a story: found out before training, trained, recorded, saved, exported.

Before ranks start, in the order of a command:

    checks.py            rules that cost nothing to check, before torch is imported or Ray started
    places.py            places outside of its directory that its files name, and whether the user chose them
    beginning.py         which version of each changed behaviour the run began with
    resume.py            what makes it the same run, and the checkpoint to continue from
    forks/               a run that begins with a checkpoint of another one
    length.py            how long it was planned to be, and what a longer plan would train
    prepare.py           everything that can be found wrong with model, tokenizer, data and census
    tokenizer.py         tokens that the run adds
    network_checks.py    what the run asks of its network
    trials/              what is tried small before it is relied on
    starting_weights.py  the weights that it begins with; base_model.py: the frozen ones; fetching.py: from the hub
    same_files.py        whether all ranks see the same files of a model
    open_record.py       its directory, its attempts, its trackers; described.py: what those receive

On every rank:

    resume_point.py      where the run is now, and how all ranks agree on that at every start
    assemble.py          a prepared run becomes objects on a rank, the only place where they are made
    build.py             the network and its optimizer: every feature in one order, for predictions, too
    loop.py              a batch, a step, and when to log, evaluate, save, stop
    measure/             what a rank measures of its steps
    reference/           what an objective of preferences compares with
    teacher/             whose predictions an objective of distillation learns from
    evaluation/          what the model is worth
    saving.py            when a save begins, and what is recorded of it
    peers/               the same for copies in the memory of nodes, and how a run goes on from one
    publish.py           a checkpoint as a Hugging Face model directory, and on the hub
"""
