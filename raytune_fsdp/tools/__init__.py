"""Tools that examine a run or a machine from outside.

audit/             trains a segment of a run again, and compares
doctor/            checks machine, cluster, storage and services before a run
digest.py          which numbers a checkpoint or a model holds
dry_run/           trains two steps of a run, measures them, and leaves nothing
torch_metadata.py  the index by which torch.distributed.checkpoint reads a checkpoint
"""
