"""Compress gradients by threshold (003 VI-A, 000 2.1) into messages, by NumPy, C and Triton."""
