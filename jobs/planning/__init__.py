"""Plan a run: the output, the time and the cost of each step. Only `measurement` measures."""
