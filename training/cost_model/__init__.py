"""Predict the seconds of a distributed training step, fitted to the papers' speed-ups."""
