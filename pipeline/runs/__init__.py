"""Exactly-once commits of tasks, sealed JSON, manifests and the quarantine ledger of a run."""
