"""Tie single-state triphones to senones by a phonetic decision tree."""
