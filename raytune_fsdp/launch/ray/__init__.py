"""A run on a Ray cluster: with tune/ray_tune/trial.py, the only code that imports ray.

On the driver:

    driver.py            checks while Ray starts, refuses, asks for workers, says how the run ended
    session.py           joins the cluster, or starts a Ray that is large enough
    resources.py         what a run asks for, and whether the cluster can provide it
    placement_groups.py  the groups that hold the workers' resources
    train_registry.py    repairs Ray Train's own list of checkpoints, before it is read
    supervisor.py        leads one attempt after another: waits for room, hears the ranks, stops, makes way, gives up
    asked.py             a stop that somebody asks for in the run directory
    attempt.py           one attempt: everything that begins and ends with it
    attempts.py          what became of each attempt, and whether another one follows
    watch/               whether the ranks of an attempt get on
    nodes/               what the cluster has, and what its nodes say
    held.py              a Ray that several commands share, held by a process of its own
    apart.py             what Ray prints into the driver's output, kept in a file

Between the driver and the ranks:

    board.py             an actor: notices to the driver, a stop to rank 0
    keepers.py           an actor on each node, which keeps peer copies from attempt to attempt
    failures.py          how fit() will end, as Ray Train's controller tells the driver; which rank failed, why, and
                         whether to try again

On the ranks and elsewhere in the cluster:

    rank.py              one rank of one attempt, as Ray Train runs it in every worker; rank_log.py: what it prints
    tasks/               windows, evaluations and exports on other CPUs and GPUs
    prometheus.py        the newest step among Ray's metrics

On all sides:

    forked/              workers that are forked from a process that has done their imports
    private.py           what we use of Ray that has no public name; private_train.py: of Ray Train
"""
