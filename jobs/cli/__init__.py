"""What the jobs' command lines share: arguments, exit codes, Spark tasks, torchrun's ranks."""
