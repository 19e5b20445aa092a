"""Pure tensor mathematics of distributed training: one equation a file, no ranks."""
