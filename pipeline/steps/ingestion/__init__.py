"""Ingestion of manifests: metadata of audio that stays where it is, in formats of other tools."""
