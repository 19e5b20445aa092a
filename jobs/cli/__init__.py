"""The command line: megahour's commands, steps, queries, Spark tasks, the ranks of torchrun."""
