"""Provide the command line of steps and queries, in this process, on Spark, on torchrun's ranks."""
