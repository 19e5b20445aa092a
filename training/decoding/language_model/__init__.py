"""Estimate n-gram language models over a closed vocabulary, and read and write them as ARPA."""

from training.decoding.language_model.kneser_ney import kneser_ney_arpa
from training.decoding.language_model.witten_bell import witten_bell_arpa

__all__ = ["kneser_ney_arpa", "witten_bell_arpa"]
