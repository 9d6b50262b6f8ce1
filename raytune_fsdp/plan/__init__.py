"""What follows from a config, without torch and without looking at a file.

plan.py         batches, lengths and mesh of a run
division.py     divides samples into steps, micro-batches and data ranks
cadence.py      after which steps something is due
counts.py       what became of the rows
failures.py     how often to save, for how often something fails
step_counts.py  what a step counts, laid out for one sum over all ranks
identity.py     how an identity may gain fields
run_dir.py      the names and places of a run directory
"""
