"""Trace an utterance through a run: where each step has it, and why a step has not."""
