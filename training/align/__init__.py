"""Align the labelled data: a monophone HMM, the tree of senones, then networks."""
