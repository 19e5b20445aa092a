"""Search graphs for best paths: sentences of the grammar are found, and no others."""

import itertools
import subprocess
import sys

import numpy as np
import pytest

from tests.training.decode.toy_language import (
    oracle_log_likelihoods,
    senones_of,
    toy_lexicon,
    toy_tree,
)
from training.decode.decoder import AlignmentError, DecoderConfig, align, decode
from training.decode.graph import DecodingGraph, alignment_graph, decoding_graph
from training.decode.lexicon import parse_lexicon
from training.decode.smoothing import witten_bell_arpa

TREE = toy_tree()
WORDS = ["a", "bee", "cab", "cabs", "see", "sake"]
SENTENCES = [["see", "a", "cab"], ["a", "bee"], ["cabs"], ["sake", "a"]]
WIDE = DecoderConfig(beam=1000.0)


@pytest.fixture(scope="module")
def graph() -> DecodingGraph:
    arpa = witten_bell_arpa(SENTENCES, toy_lexicon().pronunciations)
    return decoding_graph(toy_lexicon(), TREE, arpa)


def _planted(words: list[str], frames_a_senone: int = 2) -> list[int]:
    return [senone for senone in senones_of(words, TREE) for _ in range(frames_a_senone)]


@pytest.mark.parametrize(
    "words", [list(p) for n in (1, 2) for p in itertools.product(WORDS, repeat=n)]
)
def test_oracle_decodes_to_the_reference(graph: DecodingGraph, words: list[str]) -> None:
    """Logits of the true senones decode to their words, in or out of the training sentences.

    Only a homophone may replace a word.
    """
    scores = oracle_log_likelihoods(_planted(words), TREE.num_senones, margin=40)
    twins = {"be": "bee"}
    assert [twins.get(word, word) for word in decode(graph, scores, WIDE)] == words


@pytest.mark.parametrize("words", SENTENCES)
def test_align_returns_the_planted_senones(words: list[str]) -> None:
    """Alignment finds the planted senone of every frame, whether senones last one frame or five."""
    for frames_a_senone in (1, 5):
        planted = _planted(words, frames_a_senone)
        scores = oracle_log_likelihoods(planted, TREE.num_senones)
        found = align(alignment_graph(toy_lexicon(), TREE, words), scores)
        np.testing.assert_array_equal(found, planted)


def test_align_keeps_its_words_against_the_evidence() -> None:
    """With the logits of one sentence and the words of another, the path spells the words."""
    scores = oracle_log_likelihoods(_planted(["cabs", "see"], 4), TREE.num_senones)
    found = align(alignment_graph(toy_lexicon(), TREE, ["sake"]), scores)
    phones = [int(np.argwhere(TREE.table == senone)[0, 1]) for senone in found]
    spelled = [toy_lexicon().phones[phone] for phone, _ in itertools.groupby(phones)]
    assert [phone for phone in spelled if phone != "SIL"] == ["S", "EY", "K"]


def test_silence_between_words_and_at_the_edges_is_optional(graph: DecodingGraph) -> None:
    """Words decode alike with and without silences between them and at the edges."""
    ids = toy_lexicon().phone_ids
    for phones in (["S", "IY", "AX"], ["S", "IY", "SIL", "AX", "SIL"]):
        padded = [0, *(ids[phone] for phone in phones), 0]
        senones = [TREE.senone(*padded[i - 1 : i + 2]) for i in range(1, len(padded) - 1)]
        scores = oracle_log_likelihoods(
            [s for s in senones for _ in range(3)], TREE.num_senones, 40
        )
        assert decode(graph, scores, WIDE) == ["see", "a"]


def test_best_path_against_every_alignment() -> None:
    """For random logits and one word, no path beats `align`'s by more than the graph's costs."""
    random = np.random.default_rng(0)
    scores = random.normal(size=(6, TREE.num_senones), scale=3).astype(np.float32)
    found = align(alignment_graph(toy_lexicon(), TREE, ["cab"]), scores)
    ids = [toy_lexicon().phone_ids[phone] for phone in ("K", "AE", "B")]
    best = -np.inf
    for first, last in itertools.product([[], [0]], repeat=2):
        padded = [0, *first, *ids, *last, 0]
        senones = [TREE.senone(*padded[i - 1 : i + 2]) for i in range(1, len(padded) - 1)]
        for cuts in itertools.combinations(range(1, 6), len(senones) - 1):
            durations = np.diff([0, *cuts, 6])
            best = max(best, scores[np.arange(6), np.repeat(senones, durations)].sum())
    # Every path has 6 frames and 3 to 5 senones: self-loops and silences cost up to 2 more.
    assert scores[np.arange(6), found].sum() >= best - 3


def test_alignment_needs_a_frame_for_every_phone() -> None:
    """Too few frames, no words and unknown words are refused with the reason."""
    lexicon = toy_lexicon()
    two_frames = np.zeros((2, TREE.num_senones), np.float32)
    with pytest.raises(AlignmentError, match="2 frames: too few"):
        align(alignment_graph(lexicon, TREE, ["cabs"]), two_frames)
    with pytest.raises(AlignmentError, match="0 frames: too few"):
        align(alignment_graph(lexicon, TREE, ["cabs"]), two_frames[:0])
    with pytest.raises(ValueError, match="no words"):
        alignment_graph(lexicon, TREE, [])
    with pytest.raises(ValueError, match=r"'wasp'.*lexicon\.txt"):
        alignment_graph(lexicon, TREE, ["see", "wasp"])


def test_unusable_log_likelihoods_are_refused(graph: DecodingGraph) -> None:
    """Another model's width and values that are not finite are refused."""
    with pytest.raises(ValueError, match=f"7 senones: need {TREE.num_senones}"):
        decode(graph, np.zeros((5, 7), np.float32), WIDE)
    broken = np.full((5, TREE.num_senones), np.nan, np.float32)
    with pytest.raises(ValueError, match="not finite"):
        decode(graph, broken, WIDE)
    assert decode(graph, np.zeros((0, TREE.num_senones), np.float32), WIDE) == []
    for config in ({"beam": 0.0}, {"max_active": 1}):
        with pytest.raises(ValueError, match=next(iter(config))):
            DecoderConfig(**config)


def test_graph_needs_the_tree_of_its_lexicon() -> None:
    """A tree over other phones is refused."""
    with pytest.raises(ValueError, match="other phones"):
        alignment_graph(parse_lexicon("see S IY\n"), TREE, ["see"])


def test_package_imports_in_any_order() -> None:
    """No first import deadlocks, as the OpenFst bindings do in some orders."""
    program = "import training.decode.{}, training.decode.decoder, training.evaluate.word_errors"
    for first in ("graph", "decoder", "senones", "lexicon"):
        command = [sys.executable, "-c", program.format(first)]
        subprocess.run(command, check=True, timeout=300)
