"""Compute the tensor mathematics of the trainers: messages, block filters, mixing."""
