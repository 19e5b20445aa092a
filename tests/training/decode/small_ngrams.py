"""Small n-gram models, asked for each probability by itself."""

import itertools

from hypothesis import strategies as st

from training.decode.lexicon import UNKNOWN
from training.decode.ngrams import BackoffModel

VOCABULARY = ["a", "b", "c", "d"]
PREDICTED = [*VOCABULARY, "</s>"]
Sentences = list[list[str]]
Words = tuple[str, ...]

corpora = st.lists(
    st.lists(st.sampled_from([*VOCABULARY[:3], UNKNOWN]), max_size=7), min_size=1, max_size=12
)


class Asked:
    """Asked answers from the listed n-grams alone: it backs off until the n-gram is listed."""

    def __init__(self, model: BackoffModel) -> None:
        self.entries = {entry.ngram: entry for entry in model}

    def probability(self, history: Words, word: str) -> float:
        if (entry := self.entries.get((*history, word))) is not None:
            return float(10**entry.log_probability)
        weight = 10 ** self.entries[history].log_backoff if history in self.entries else 1.0
        return weight * self.probability(history[1:], word)

    def total(self, history: Words) -> float:
        return sum(self.probability(history, word) for word in PREDICTED)


def histories_below(order: int) -> list[Words]:
    return [
        words
        for length in range(order)
        for words in itertools.product(["<s>", *VOCABULARY], repeat=length)
        if "<s>" not in words[1:]
    ]
