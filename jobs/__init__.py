"""The steps, one file each, runnable by spark-submit, torchrun or python -m."""
