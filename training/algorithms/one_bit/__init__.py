"""Compute 1-bit SGD's tensor mathematics (paper 004): columns, messages, two-stage aggregation."""
