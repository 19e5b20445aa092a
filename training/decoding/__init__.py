"""Align transcripts to senones, and decode log-likelihoods to words."""
