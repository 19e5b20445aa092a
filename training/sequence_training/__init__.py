"""Sequence training on lattices: forward-backward and state-level minimum Bayes risk (003 II-C)."""
