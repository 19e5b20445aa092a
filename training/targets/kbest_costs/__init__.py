"""The costs of storing k logits a frame: by frame, and on a sample of a run."""
