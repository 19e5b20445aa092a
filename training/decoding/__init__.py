"""From transcripts to senone alignments, and from log-likelihoods to words."""
