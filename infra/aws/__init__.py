"""Describe what runs on AWS: a role for each step, and the requests that launch its cluster."""
