"""Augmentation of training features, by utterance and sub-epoch: SpecAugment and speed."""
