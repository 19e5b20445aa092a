"""Acoustic models, their losses, and where trained ones are stored."""
