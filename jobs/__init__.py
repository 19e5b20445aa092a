"""The commands, one file each; megahour, spark-submit, torchrun or python -m start them."""
