"""Word error rates of the held-out subset (paper 003 VII-D, VIII-C)."""
