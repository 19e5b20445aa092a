"""Bytes of an audio file to 16 kHz samples, or a named reason why there are none."""
