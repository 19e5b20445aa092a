"""Collect the report of a run, and show it as a page and in the terminal."""
