"""Extend a run: new metadata, what was selected before, and where streams ended."""
