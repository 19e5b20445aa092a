"""Define a toy language for the decoding tests: eight phones, a tree, words that collide."""

import numpy as np

from training.align.tree_growing import grow_tree, triphone_statistics
from training.decode.decoder import BestPath, DecoderConfig, StreamingSearch
from training.decode.graph import DecodingGraph
from training.decode.lexicon import Lexicon, parse_lexicon
from training.decode.senones import PhoneAlignment, SenoneTree
from training.settings.decoding import TreeConfig

# "bee" and "be" are homophones, "cab" begins "cabs", "a" is one phone and has two pronunciations.
LEXICON_TXT = """\
a AX
a(2) EY
be B IY
bee B IY
cab K AE B
cabs K AE B S
see S IY
sake S EY K
"""


def toy_lexicon() -> Lexicon:
    return parse_lexicon(LEXICON_TXT)


def toy_speech(
    num_utterances: int = 30, seed: int = 0
) -> tuple[dict[str, np.ndarray], dict[str, PhoneAlignment]]:
    """Return random phone strings whose frames depend on the phone and on both its neighbours."""
    random = np.random.default_rng(seed)
    num_phones = len(toy_lexicon().phones)
    own, left, right = (random.normal(size=(num_phones, 39)) for _ in range(3))
    frames, alignments = {}, {}
    for number in range(num_utterances):
        phones = np.concatenate([[0], random.integers(1, num_phones, 40), [0]]).astype(np.int32)
        durations = random.integers(3, 12, len(phones))
        starts = (np.cumsum(durations) - durations).astype(np.int32)
        name = f"utterance-{number}"
        alignments[name] = PhoneAlignment(phones, starts, int(durations.sum()))
        before, centre, after = alignments[name].triphones.T
        means = 2 * own[centre] + 0.5 * left[before] + 0.5 * right[after]
        noise = random.normal(size=(durations.sum(), 39))
        frames[name] = (np.repeat(means, durations, axis=0) + noise).astype(np.float32)
    return frames, alignments


def toy_tree(max_senones: int = 40) -> SenoneTree:
    statistics = triphone_statistics(*toy_speech())
    return grow_tree(statistics, toy_lexicon().phones, TreeConfig(max_senones, 30)).tree


def senones_of(words: list[str], tree: SenoneTree) -> list[int]:
    """Return the senones of a sentence's first pronunciations, with silence only at both ends."""
    lexicon = toy_lexicon()
    spoken = [phone for word in words for phone in lexicon.pronunciations[word][0]]
    phones = [lexicon.phone_ids[phone] for phone in ("SIL", *spoken, "SIL")]
    padded = [0, *phones, 0]
    return [tree.senone(*padded[i - 1 : i + 2]) for i in range(1, len(padded) - 1)]


def oracle_log_likelihoods(senones: list[int], num_senones: int, margin: float = 8.0) -> np.ndarray:
    """Return scores of 0 for the planted senone of each frame, and of -margin for the others."""
    scores = np.full((len(senones), num_senones), -margin, np.float32)
    scores[np.arange(len(senones)), senones] = 0
    return scores


def best_path(graph: DecodingGraph, scores: np.ndarray, config: DecoderConfig) -> BestPath:
    """Return the best path of an utterance, whose end may be within a sentence."""
    search = StreamingSearch(graph, config)
    search.advance(scores)
    path = search.best(ends_sentence=True)
    assert path is not None
    return path
