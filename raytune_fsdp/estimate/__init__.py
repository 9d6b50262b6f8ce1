"""The work of training, as far as it follows from shapes and counts.

    flops.py   floating-point operations of training, and the fraction of a device's peak that they amount to (MFU)
    traffic.py what a rank's collectives move in a step
    devices.py what devices have and reach: memory, bandwidth, links, large products

Imports no torch.
"""
