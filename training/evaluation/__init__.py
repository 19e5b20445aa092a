"""Evaluate models by word errors on the held-out subset (paper 003 VII-D, VIII-C)."""
