"""Collect the contents of report.json from the manifests and records of a run."""
