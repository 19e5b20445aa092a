"""Measure how uniform the order is in which a run's trainer reads (paper 003 IV-A2)."""
