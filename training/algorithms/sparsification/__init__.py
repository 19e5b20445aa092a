"""Sparse messages of a vector: its largest elements, in few bits each (arXiv 2508.15706)."""
