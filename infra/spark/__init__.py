"""Spark sessions, the Java that they need, and the archives that a cluster runs."""
