"""A run on a Ray cluster: the only code that imports ray.

On the driver:

    driver            checks while Ray starts, refuses, asks for workers, says how the run ended
    session           joins the cluster, or starts a Ray that is large enough
    resources         what is asked for, and whether the cluster can provide it
    train_registry    repairs Ray Train's own list of checkpoints, before it is read
    follow            what the ranks report; stopping; waiting for resources, and giving up
    watch             whether the ranks get on
    placement_groups  the groups that hold the workers' resources
    exports           exports during training
    nodes_checked     what `raytune-fsdp doctor` asks a cluster that runs already

On all sides:

    private           what we use of Ray that has no public name

Between the driver and the ranks:

    board             an actor: notices to the driver, a stop to rank 0
    failures          in Ray Train's controller: which rank failed, why, and whether to try again

On the ranks and on the CPUs of the cluster:

    rank              what Ray Train runs in every worker
    stream            the windows through Ray Data
    batches           a rank's blocks of the stream become its batches
    tasks             many calls of a function on the CPUs of the cluster, their results in order
"""
