"""A run on a Ray cluster: the only code that imports ray.

driver            check while Ray starts; refuse; ask for workers; say how the run ended
session           join the cluster, or start a Ray that is large enough
resources         what is asked for, and whether the cluster can give it
placement_groups  the groups that hold the workers' resources
follow            what the ranks report; stopping; waiting for resources, and giving up
board             an actor between the driver and the ranks
failures          who failed, of what, and whether to try again
rank              what Ray Train runs in the process of every rank
stream, batches   the data through Ray Data
tasks             work on the CPUs of the cluster
exports           exports beside training
train_registry    Ray Train's own list of checkpoints, repaired
"""
