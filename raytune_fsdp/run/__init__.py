"""What a run is and where it stands: found out before training, recorded while it trains.

In the order of a command:

    checks           rules that cost nothing to check, before torch is imported or Ray started
    prepare          everything that can be found wrong before a rank starts: model, tokenizer, data, census
    probe            one step of a small part of the network, as some configs fail only there
    standing         where the run is now; how all ranks agree on that at every start
    resume           what makes it the same run, and the checkpoint to continue from
    initial_weights  the weights of a run that begins: a model directory, a checkpoint of another run, or a seed
    kernels          the attention and the loss that it computes with, and whether its blocks are compiled
    record           what a run writes about itself: its directory, its attempts, its trackers
    places           what its files name outside of its directory, and whether the user has chosen that
    publish          a checkpoint as a Hugging Face model directory, and on the hub
"""
