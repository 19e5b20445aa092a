"""Acoustic models from training partitions: losses, distributed trainers, decoding, evaluation."""
