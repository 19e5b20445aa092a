"""The bootstrap HMM that makes the first alignment."""
