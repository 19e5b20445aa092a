"""Words are where their phones were planted, whatever the graph does with their labels."""

import numpy as np
import pytest

from tests.training.decode.toy_language import oracle_log_likelihoods, toy_lexicon, toy_tree
from training.decode.decoder import DecoderConfig, best_path
from training.decode.graph import decoding_graph
from training.decode.lexicon import SILENCE_ID
from training.decode.smoothing import witten_bell_arpa
from training.decode.word_times import Span, word_spans

TREE, LEXICON = toy_tree(), toy_lexicon()
WORDS = sorted(set(LEXICON.pronunciations) - {"be"})


def speak(words: list[str], random: np.random.Generator) -> tuple[np.ndarray, list[Span]]:
    """Draw pronunciations, silences and durations; return the frames' senones and the truth."""
    phones, owners = [], []
    for number in range(len(words) + 1):
        if random.random() < 0.5:
            phones, owners = [*phones, SILENCE_ID], [*owners, -1]
        if number < len(words):
            spelled = random.choice(len(LEXICON.pronunciations[words[number]]))
            spoken = [
                LEXICON.phone_ids[phone] for phone in LEXICON.pronunciations[words[number]][spelled]
            ]
            phones, owners = [*phones, *spoken], [*owners, *[number] * len(spoken)]
    padded = [SILENCE_ID, *phones, SILENCE_ID]
    senones = [TREE.senone(*padded[i - 1 : i + 2]) for i in range(1, len(padded) - 1)]
    durations = random.integers(1, 5, len(phones))
    of_frames = np.repeat(owners, durations)
    spans = [
        Span(int(frames[0]), int(frames[-1]) + 1)
        for frames in (np.flatnonzero(of_frames == number) for number in range(len(words)))
    ]
    return np.repeat(senones, durations).astype(np.int64), spans


def test_words_are_where_they_were_spoken() -> None:
    """Of 60 sentences every word has its frames, but where two phones of one senone meet."""
    random = np.random.default_rng(4)
    num_words = num_right = 0
    for _ in range(60):
        words = [str(word) for word in random.choice(WORDS, random.integers(1, 6))]
        senones, truth = speak(words, random)
        found = word_spans(senones, words, LEXICON, TREE)
        assert [span.start for span in found] == sorted(span.start for span in found)
        num_words += len(words)
        num_right += sum(one == other for one, other in zip(found, truth, strict=True))
    # The toy's tree has 40 senones: silence between two words is the end of the first one's.
    assert num_right >= 0.97 * num_words


def test_decoded_words_have_the_times_of_their_phones() -> None:
    """A graph moves its words' labels; the times of what it decodes are those of the speech."""
    graph = decoding_graph(LEXICON, TREE, witten_bell_arpa([["see", "a"]], LEXICON.pronunciations))
    random = np.random.default_rng(5)
    for _ in range(20):
        words = [str(word) for word in random.choice(["see", "sake"], 4)]
        senones, truth = speak(words, random)
        scores = oracle_log_likelihoods(senones.tolist(), TREE.num_senones, 60)
        path = best_path(graph, scores, DecoderConfig(beam=1000.0))
        assert path is not None
        assert path.senones.tolist() == senones.tolist()
        assert word_spans(path.senones, path.words, LEXICON, TREE) == truth


@pytest.mark.parametrize(
    ("num_frames", "words", "spans"),
    [(0, [], []), (7, [], []), (0, ["a"], [(0, 0)]), (7, ["cab", "a"], [(0, 3), (3, 7)])],
)
def test_frames_without_an_explanation_are_shared(
    num_frames: int, words: list[str], spans: list[tuple[int, int]]
) -> None:
    """A search that ended within a word leaves frames of no transcript: words share them evenly."""
    silence = np.full(num_frames, TREE.senone(0, 0, 0), np.int64)
    assert word_spans(silence, words, LEXICON, TREE) == spans
