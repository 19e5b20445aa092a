"""Start each command from its own file, by megahour, spark-submit, torchrun or python -m."""
