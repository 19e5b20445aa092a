"""Measure what each step of a run takes, by the number of tiny utterances."""
