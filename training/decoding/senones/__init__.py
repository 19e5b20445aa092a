"""Senones: the phonetic decision tree that ties single-state triphones."""
