"""Checkpoints of the whole training state, and their resharding to another number of ranks."""
