"""Training of one model: which model, on which sub-epochs, the loop, its progress."""
