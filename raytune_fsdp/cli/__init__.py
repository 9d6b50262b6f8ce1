"""The commands: they read arguments, print, and turn errors into exit codes.

    main.py        finds the command
    common.py      shared by all: arguments that fail in one line, config files with overrides, exit codes
    progress.py    shows the progress of long work: in a region of the terminal, or in lines
    screen.py      the process that owns the terminal meanwhile
    region.py      the region that it rewrites in place

    train.py       fine-tune a model
    fork.py        begin a run where another one was after a step
    sweep.py       many runs that differ in some values, and which is the best
    data.py        look at the data, count it, remove old prepared data
    plan.py        what a config amounts to; plan_rows.py: how many rows it has; plan_on_gpus.py: memory and time;
                   plan_as_page.py: a page with sliders; plan_calibrate.py: measures a machine;
                   plan_failures.py: how often to save
    doctor.py      check machine, cluster, storage and services
    runs.py        list the runs of a storage directory
    watch.py       follow a run that another command trains
    logs.py        what the ranks of a run have printed
    report.py      the page about a run
    checkpoint.py  ask a run for a checkpoint now, list its checkpoints, verify them, let torch read them
    stop.py        let a run commit a checkpoint and end
    digest.py      which numbers a checkpoint or a model holds
    generate.py    ask a trained model; chat.py: talk with it
    eval.py        measure a model on evaluation data; eval_harness.py: by tasks of lm-evaluation-harness
    diff.py        the first step at which two runs part
    step.py        which rows a step trained on; audit.py: train a segment again, and compare
    export.py      a checkpoint -> a model directory; average.py: the mean of several
    recipes.py     list, show and copy the configs that come with the package
    convert.py     another trainer's config into one of ours
    schema.py      the config's JSON schema
    completion.py  what may follow on the command line; completion_scripts.py: that for bash, zsh and fish

Commands import heavy packages inside their functions, so `--help` and a mistyped flag need no torch.
"""
