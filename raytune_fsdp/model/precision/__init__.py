"""Weights and products in fewer than 16 bits.

quantized.py  frozen weights of 4 or 8 bits
fp8.py        linear layers that multiply in 8 bits while they train
"""
