"""What is saved, and how it becomes visible: a checkpoint is complete, verified and there, or it is not there.

`state.py` is everything that is not a tensor, `tensors.py` everything that is, `commit.py` the directory on storage.
Layout of a checkpoint (docs/architecture.md tells why):

    checkpoints/step-00000050.a3/    attempt 3's checkpoint of step 50
        __0_0.distcp ...             tensors, a file a rank (torch.distributed.checkpoint)
        .metadata                    which tensor is where in them
        state.json                   step, cursor, identity of the run, ...
        manifest.json                size and xxh3 of every file above; written last
"""
