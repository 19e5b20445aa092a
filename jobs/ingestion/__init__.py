"""Corpora of a user's own into the store: audio, metadata by speaker bucket."""
