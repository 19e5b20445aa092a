"""Synthesize the demo's corpus: text, voices, rooms and noise, as a Kaldi data directory."""
