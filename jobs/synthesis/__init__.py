"""The demo corpus, made by code: text, voices, rooms and noise, as a Kaldi data directory."""
