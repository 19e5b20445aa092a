"""The plan of a run: what each step makes, what it takes, what it costs; pure but for measuring."""
