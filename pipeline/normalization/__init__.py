"""Causal speaker means, and global mean and variance (paper 003 II-B, IV-B2)."""

from pipeline.normalization.causal_mean import CausalMean, Moments

__all__ = ["CausalMean", "Moments"]
