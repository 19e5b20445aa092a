"""Figures of how near a training order is to a uniform one (the shuffle of paper 003 IV-A2)."""
