"""Targets of the frames: forced alignments of labelled speech, the teacher's k best logits."""
