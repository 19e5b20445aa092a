"""Compute the tensor mathematics of the trainers: GTC's messages and BMUF's block filter."""
