"""Gradient threshold compression (003 VI-A, 000 2.1): its messages, by NumPy, C and Triton."""
