"""Train two whole steps of a run, measure them, and leave nothing: does it fit, and how long will it take?

    two_steps.py   the dry run itself; whether a fork could begin with its parent's checkpoint, and change what it
                   changes
    scratch.py     a directory that is removed whatever happens
    trial.py       the config of the ordinary run of two steps that is trained in it
    outcome.py     what the record of the two steps says, in words

The directory of the run itself is not written, and read only if the run is a fork.
"""
