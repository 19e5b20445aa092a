"""Train by 1-bit SGD (paper 004): its exchanges, its double buffer and its state."""
