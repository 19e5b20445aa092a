"""What distributed training costs: a step's seconds, fitted to the papers' speed-ups."""
