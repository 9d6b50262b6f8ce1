"""What a run costs, before anything is started.

    flops.py   floating-point operations of training, and the fraction of a device's peak that they amount to (MFU)

Imports no torch.
"""
