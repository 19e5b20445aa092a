"""Decode log-likelihoods to words: lexicon, language models, graphs, search."""
