"""Describe what runs on AWS: a role for each step, and what its hosts install."""
