"""Gradient threshold compression (paper 003 VI-A, 000 2.1): its messages, by four engines."""
