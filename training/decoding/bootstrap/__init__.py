"""Make the first alignment by a monophone HMM."""
