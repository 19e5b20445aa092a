"""Best paths are sentences of the grammar, with senones and words where they were planted."""

import itertools
import subprocess
import sys
from collections.abc import Iterable

import numpy as np
import pytest

from tests.training.decode.toy_language import (
    best_path,
    oracle_log_likelihoods,
    senones_of,
    toy_lexicon,
    toy_tree,
)
from tests.training.decode.whole_graphs import decoding_graph, witten_bell_arpa
from training.decode.decoder import (
    ALIGNMENT_BEAM,
    AlignmentError,
    DecoderConfig,
    Span,
    align,
    decode,
    word_spans,
)
from training.decode.graph import DecodingGraph, alignment_graph
from training.decode.lexicon import SILENCE_ID, parse_lexicon
from training.decode.senones import expand_to_frames

TREE, LEXICON = toy_tree(), toy_lexicon()
WORDS = ["a", "bee", "cab", "cabs", "sake", "see"]
SENTENCES = [["see", "a", "cab"], ["a", "bee"], ["cabs"], ["sake", "a"]]
WIDE = DecoderConfig(beam=1000.0)


@pytest.fixture(scope="module")
def graph() -> DecodingGraph:
    arpa = witten_bell_arpa(SENTENCES, LEXICON.pronunciations)
    return decoding_graph(LEXICON, TREE, arpa)


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
        found = align(alignment_graph(LEXICON, TREE, words), scores)
        np.testing.assert_array_equal(found, planted)


def test_align_keeps_its_words_against_the_evidence() -> None:
    """With the logits of one sentence and the words of another, the path spells the words."""
    scores = oracle_log_likelihoods(_planted(["cabs", "see"], 4), TREE.num_senones)
    found = align(alignment_graph(LEXICON, TREE, ["sake"]), scores)
    assert [phone for phone in _spelled(found) if phone != "SIL"] == ["S", "EY", "K"]


@pytest.mark.parametrize("beam", [1.0, ALIGNMENT_BEAM])
def test_align_keeps_its_words_however_unlikely(beam: float) -> None:
    """All words are spelled where staying in the first phone is better by any margin a frame."""
    words = ["sake", "cabs"] * 6
    scores = oracle_log_likelihoods(_planted(words, 1)[:1] * 60, TREE.num_senones, 1e4)
    found = align(alignment_graph(LEXICON, TREE, words), scores, beam)
    of_words = ["S", "EY", "K", "K", "AE", "B", "S"] * 6
    spelled = [phone for phone, _ in itertools.groupby(of_words)]
    assert [phone for phone in _spelled(found) if phone != "SIL"] == spelled


def _spelled(senones: Iterable[int]) -> list[str]:
    phones = [int(np.argwhere(TREE.table == senone)[0, 1]) for senone in senones]
    return [LEXICON.phones[phone] for phone, _ in itertools.groupby(phones)]


def test_silence_between_words_and_at_the_edges_is_optional(graph: DecodingGraph) -> None:
    """Words decode alike with and without silences between them and at the edges."""
    ids = LEXICON.phone_ids
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
    found = align(alignment_graph(LEXICON, TREE, ["cab"]), scores)
    ids = [LEXICON.phone_ids[phone] for phone in ("K", "AE", "B")]
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
    two_frames = np.zeros((2, TREE.num_senones), np.float32)
    with pytest.raises(AlignmentError, match="2 frames: too few"):
        align(alignment_graph(LEXICON, TREE, ["cabs"]), two_frames)
    with pytest.raises(AlignmentError, match="0 frames: too few"):
        align(alignment_graph(LEXICON, TREE, ["cabs"]), two_frames[:0])
    with pytest.raises(ValueError, match="no words"):
        alignment_graph(LEXICON, TREE, [])
    with pytest.raises(ValueError, match=r"'wasp'.*lexicon\.txt"):
        alignment_graph(LEXICON, TREE, ["see", "wasp"])


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


def test_words_before_a_cut_keep_their_times() -> None:
    """The word within which a search ended shares its frames with those written after it."""
    words, random = ["see", "cab", "sake"], np.random.default_rng(6)
    senones, truth = speak(words, random)
    first, second, third = truth
    end = second.end - 1
    assert word_spans(senones[: third.end - 1], words, LEXICON, TREE)[:2] == [first, second]
    begin, middle = second.start, (second.start + end) // 2
    cut = word_spans(senones[:end], words, LEXICON, TREE)
    assert cut == [first, (begin, middle), (middle, end)]


def test_frames_of_a_word_that_is_not_written_yet_are_of_none() -> None:
    """A graph writes a word late where others begin as it does."""
    senones, truth = speak(["see", "cab", "sake"], np.random.default_rng(6))
    first, second = word_spans(senones[: truth[2].end - 1], ["see", "cab"], LEXICON, TREE)
    assert (first, second.start) == (truth[0], truth[1].start)
    assert second.end <= truth[1].end


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_expanding_inverts_the_low_rate_view(offset: int) -> None:
    """`alignment[offset + 1 :: 3]` of the expanded senones gives them back."""
    senones = np.arange(20, dtype=np.int64)
    frames = expand_to_frames(senones, offset, 64)
    assert len(frames) == 64
    np.testing.assert_array_equal(frames[offset + 1 :: 3][:20], senones)
