"""Audits of a written run: verification, provenance, and the trace of one utterance."""
