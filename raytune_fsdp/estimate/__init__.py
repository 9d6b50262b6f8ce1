"""The work of training, as far as it follows from shapes and counts.

    flops.py   floating-point operations of training, and the fraction of a device's peak that they amount to (MFU)

Imports no torch.
"""
