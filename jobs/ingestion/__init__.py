"""Ingest a user's corpus into the store: audio, and metadata by speaker bucket."""
