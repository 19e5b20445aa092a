"""Targets of transcripts: the alignment's where words are right, the teacher's own elsewhere."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax

from infra.settings import canonical_json
from infra.store.object_store import ObjectStore
from pipeline.kbest import select_kbest, soft_targets
from pipeline.records import Hypothesis
from pipeline.runs.commit import step_context
from pipeline.runs.engine import write_manifest
from pipeline.runs.manifest import Manifest, manifest_uri, read_manifest
from pipeline.runs.names import BOOTSTRAP_STEP, TEACHER
from pipeline.settings import TargetsConfig
from pipeline.shards import FeatureRow
from pipeline.splicing import splice
from pipeline.steps.targets import generate_targets
from tests.in_process_teacher import stream_alone
from tests.small_corpus import serially
from tests.training.decode.toy_language import senones_of, toy_lexicon
from tests.training.sequence_training.toy_run import SCALE, TREE, sentence_row
from tests.training.targets.test_lattice_targets import EVALUATION
from tests.training.targets.unlabelled_toy_run import (
    BIDIRECTIONAL,
    CONFIG,
    SHARDS,
    K,
    digests,
    from_logits,
    remove_targets,
    rows_of,
    unlabelled_rows,
    write_unlabelled_toy_run,
)
from training.decode.graph import alignment_graph
from training.decode.letter_to_sound import LetterToSound
from training.decode.lexicon import Lexicon
from training.evaluate.graph_building import build_graphs
from training.evaluate.stored_graphs import BuiltGraphs
from training.models.store import load_model
from training.sequence_training.forward_backward import StatePosteriors, state_posteriors
from training.sequence_training.lattice_decoder import decode_lattice
from training.settings.decoding import LatticeTargetsConfig, TranscriptsConfig, UnknownWordsRule
from training.targets.lattice_targets import LatticeSearch, search_settings
from training.targets.teacher import decode_logits, serve_logits
from training.targets.transcript_targets import (
    MAX_WORDS,
    TranscriptAligner,
    TranscriptPlace,
    UnusableTranscriptError,
    confidence_of,
    open_aligner,
    open_transcript_teacher,
    overlap,
    transcript_kbest,
)

CERTAIN = TranscriptsConfig(weight=1.0, garbage_cost=1000.0, max_garbage=1.0)
"""Garbage never pays, and the targets are the alignment's alone."""


def heard_rows(shard: int, texts: Callable[[str], tuple[Hypothesis, ...]]) -> list[FeatureRow]:
    """The shard's rows, each with what `texts` makes of its true words."""
    number, first = SHARDS[shard]
    spoken = [sentence_row(first + 10, row).text for row in range(number)]
    pairs = zip(unlabelled_rows(shard), spoken, strict=True)
    return [replace(row, hypotheses=texts(text or "")) for row, text in pairs]


def truth(text: str) -> tuple[Hypothesis, ...]:
    """As a recognizer writes it: with case and punctuation."""
    return (Hypothesis("r", f"{text.capitalize()}.", 0.0),)


def write_run(folder: Path, texts: Callable[[str], tuple[Hypothesis, ...]]) -> Path:
    write_unlabelled_toy_run(folder, [heard_rows(shard, texts) for shard in range(len(SHARDS))])
    return folder


def label(
    folder: Path,
    config: TranscriptsConfig,
    columns: TargetsConfig = CONFIG,
    lattices: LatticeSearch | None = None,
) -> Manifest:
    """Label into a fresh targets step, by transcripts."""
    store, run_uri = ObjectStore((str(folder),)), str(folder / "run")
    remove_targets(folder)
    function = serve_logits("cpu", run_uri, canonical_json(BIDIRECTIONAL), TEACHER)
    place = TranscriptPlace(store, run_uri, str(folder / "corpus"), config)
    score = partial(stream_alone, function, decode_logits)
    teacher = open_transcript_teacher(place, score, K, EVALUATION, lattices, columns.tail_samples)
    return generate_targets(store, run_uri, columns, teacher, serially, loss_budget=1.0).manifest


@pytest.fixture(scope="module")
def true_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose unlabelled utterances have transcripts without errors."""
    return write_run(tmp_path_factory.mktemp("true"), truth)


def test_true_words_give_their_soft_alignment(true_run: Path) -> None:
    """The targets are the state posteriors of the words' alignment graph."""
    store, run_uri = ObjectStore((str(true_run),)), str(true_run / "run")
    trained, lexicon = load_model(store, run_uri, TEACHER, BIDIRECTIONAL), toy_lexicon()
    manifest = label(true_run, CERTAIN)
    assert manifest.statistics["mean_transcript_share"] == pytest.approx(1.0)
    assert "without_transcript" not in manifest.statistics
    found = {row.utterance_id: row for row in rows_of(true_run, manifest)}
    rows = [row for shard in range(len(SHARDS)) for row in heard_rows(shard, truth)]
    for row in rows:
        target = found[row.utterance_id]
        spliced = torch.from_numpy(splice(row.features, target.offset).astype(np.float32))
        logits = trained.model.utterance_logits([spliced])[0].log_softmax(dim=1)
        scores = (SCALE * (logits - trained.log_priors)).numpy()
        (hypothesis,) = row.hypotheses
        words = hypothesis.text.lower().strip(".").split()
        beams = LatticeTargetsConfig(beam=200.0, lattice_beam=8.0)
        each = state_posteriors(
            decode_lattice(alignment_graph(lexicon, TREE, words), scores, beams), scores
        )
        expected = np.zeros(scores.shape)
        expected[each.frames, each.senones] = each.probabilities
        kept = np.take_along_axis(expected, target.kbest.senones.astype(np.int64), axis=1)
        kept /= kept.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(soft_targets(target.kbest), kept, atol=2e-3)


def test_weight_0_writes_the_logits_targets(true_run: Path) -> None:
    """All shards have the bytes that the source "logits" gives, and statistics are the same."""
    own, found = from_logits(true_run), label(true_run, replace(CERTAIN, weight=0.0))
    assert digests(found) == digests(own)
    assert found.statistics == own.statistics


def test_the_same_bytes_again(true_run: Path) -> None:
    """Another pass over the same run."""
    config = replace(CERTAIN, weight=0.5, garbage_cost=3.0)
    assert label(true_run, config).to_bytes() == label(true_run, config).to_bytes()


@pytest.mark.parametrize(
    ("texts", "config", "reason"),
    [
        (lambda _: (), CERTAIN, "no_transcript"),
        (lambda _: (Hypothesis("r", "[noise] ..."),), CERTAIN, "empty_transcript"),
        (lambda _: (Hypothesis("r", "zebra quagga see"),), CERTAIN, "unknown_words"),
        (
            lambda text: (Hypothesis("r", text, -5.0),),
            replace(CERTAIN, agreement=0.0, min_confidence=0.5),
            "low_confidence",
        ),
        (truth, replace(CERTAIN, garbage_cost=0.0, max_garbage=0.0), "not_aligned"),
    ],
)
def test_what_cannot_be_aligned_keeps_the_teachers_own(
    tmp_path: Path,
    texts: Callable[[str], tuple[Hypothesis, ...]],
    config: TranscriptsConfig,
    reason: str,
) -> None:
    """All of the logits' bytes, the reason with its count; or else rows of the ledger."""
    folder = write_run(tmp_path, texts)
    own, found = from_logits(folder), label(folder, config)
    assert digests(found) == digests(own)
    number = sum(number for number, _ in SHARDS)
    assert found.statistics["without_transcript"] == {reason: number}
    assert found.tally_in == found.tally_out
    lost = label(folder, replace(config, unaligned="row"))
    assert lost.quarantined == lost.tally_in == own.tally_out
    assert [each.reasons for each in lost.ledgers] == [
        {"teacher_failed": number} for number, _ in SHARDS
    ]


def spoken(words: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Three frames of each senone, in no doubt; and the number of the word of each frame."""
    lexicon = toy_lexicon()
    sizes = [1, *(len(lexicon.pronunciations[word][0]) for word in words), 1]
    senones = np.repeat(senones_of(words, TREE), 3)
    scores = np.full((len(senones), TREE.num_senones), -9.0, np.float32)
    scores[np.arange(len(senones)), senones] = 0.0
    return scores, np.repeat(np.arange(-1, len(words) + 1), [3 * size for size in sizes])


def masses_of(
    words: list[str],
    text: str,
    lexicon: Lexicon | None = None,
    rule: UnknownWordsRule = "row",
    **settings: Any,
) -> np.ndarray:
    """Return by word, silence at both ends too, how much of its frames the text's words have."""
    scores, numbers = spoken(words)
    config = TranscriptsConfig(max_garbage=1.0, max_unknown=1.0, **settings)
    lexicon = lexicon or toy_lexicon()
    letters = LetterToSound.of(lexicon) if rule == "letters" else None
    aligner = TranscriptAligner.of(lexicon, TREE, config, letters)
    found = aligner.posteriors((Hypothesis("r", text),), scores, aligner.config.garbage_cost)
    masses = np.bincount(found.frames, found.probabilities, minlength=len(scores))
    return np.array([masses[numbers == each].mean() for each in np.unique(numbers)])


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("see cab sake a", [1, 1, 1, 1, 1, 1]),
        ("see be sake a", [1, 1, 0, 1, 1, 1]),
        ("see sake a", [1, 1, 0, 1, 1, 1]),
        ("see quagga sake a", [1, 1, 0, 1, 1, 1]),
        ("see cab zebra", [1, 1, 1, 0, 0, 1]),
    ],
)
def test_wrong_words_bend_no_neighbours(text: str, kept: list[float]) -> None:
    """Frames of a word that the text lacks, or has another for, are garbage; all others are not."""
    found = masses_of(["see", "cab", "sake", "a"], text, garbage_cost=3.0)
    # At a word's edge a phone beside silence, which garbage is for it, may have another senone.
    np.testing.assert_allclose(found, kept, atol=0.35)


@pytest.mark.parametrize("spelled", [str, str.upper])
def test_letters_pronounce_what_recognizers_heard(spelled: Callable[[str], str]) -> None:
    """By the rule "letters" a word that the lexicon lacks has frames, whatever the case of both."""
    known = {spelled(word): said for word, said in toy_lexicon().pronunciations.items()}
    found = {
        rule: masses_of(["see", "cab", "sake"], "see caab sake", Lexicon(known), rule)
        for rule in ("row", "letters")
    }
    np.testing.assert_allclose(found["row"], [1, 1, 0, 1, 1], atol=0.35)
    np.testing.assert_allclose(found["letters"], 1, atol=0.01)


def test_unknown_words_are_pronounced_as_the_run_does(tmp_path: Path) -> None:
    """The bootstrap's rule is the targets', too."""
    store, run_uri, corpus_uri = write_unlabelled_toy_run(tmp_path)
    bootstrap = read_manifest(store, run_uri, BOOTSTRAP_STEP)
    Path(manifest_uri(run_uri, BOOTSTRAP_STEP)).unlink()
    by_letters = replace(bootstrap, config={"unknown_words": "letters"})
    write_manifest(step_context(store, run_uri, BOOTSTRAP_STEP, {}, {}), by_letters)
    place = TranscriptPlace(store, run_uri, corpus_uri, replace(CERTAIN, max_unknown=0.0))
    aligner = open_aligner(place)
    aligner.graph((Hypothesis("r", "see caab sake", None),))
    with pytest.raises(UnusableTranscriptError, match="'zebra'"):
        aligner.graph((Hypothesis("r", "see zebra sake", None),))


def test_a_cost_of_garbage_bends_them() -> None:
    """Where garbage never pays, a wrong word has frames of its neighbours' senones."""
    scores, _ = spoken(["see", "cab", "sake"])
    config = TranscriptsConfig(garbage_cost=1000.0)
    aligner = TranscriptAligner.of(toy_lexicon(), TREE, config)
    found = aligner.posteriors(
        (Hypothesis("r", "see be sake"),), scores, aligner.config.garbage_cost
    )
    masses = np.bincount(found.frames, found.probabilities, minlength=len(scores))
    np.testing.assert_allclose(masses, 1.0, atol=1e-6)
    assert (scores[found.frames, found.senones] < 0).any()


def test_garbage_keeps_the_teachers_own_bytes() -> None:
    """Frames without words are the logits' own; others are mixed by what the words have there."""
    logits = np.random.default_rng(0).normal(size=(4, 9)).astype(np.float32)
    words = StatePosteriors(*(np.array(x) for x in ([0, 2, 2], [3, 1, 4])), np.array([1, 0.3, 0.1]))
    own = select_kbest(logits, K)
    found = transcript_kbest(logits, words, np.full(4, 0.5), K)
    for frame in (1, 3):
        assert found.rows(slice(frame, frame + 1)).logits.tobytes() == own.logits[frame].tobytes()
        assert (found.senones[frame] == own.senones[frame]).all()
        assert found.log_z[frame] == own.log_z[frame]
    expected = 0.8 * softmax(logits[2].astype(np.float64))
    expected[[1, 4]] += 0.5 * np.array([0.3, 0.1])
    shares = np.exp(found.logits[2].astype(float) - float(found.log_z[2]))
    np.testing.assert_allclose(shares, expected[found.senones[2]], atol=2e-3)
    assert found.transcript_share == pytest.approx(0.5 * 1.4 / 4)


def lattices_of(folder: Path) -> LatticeSearch:
    """The toy run's own search, by the n-gram model of its labelled words."""
    run = (ObjectStore((str(folder),)), str(folder / "run"))
    build_graphs(*run, str(folder / "corpus"), EVALUATION, (2,))
    config = LatticeTargetsConfig(beam=40.0, lattice_beam=25.0)
    return LatticeSearch(BuiltGraphs.of(*run), search_settings(*run, EVALUATION, config), config)


def test_what_the_runs_own_lattice_lacks_is_not_trusted(tmp_path: Path) -> None:
    """Wrong words weigh less than right ones, and at share 0 all are bytes as without lattices."""
    shares = []
    for name, texts in (("right", truth), ("wrong", lambda _: (Hypothesis("r", "be be be be"),))):
        folder = write_run(tmp_path / name, texts)
        lattices = lattices_of(folder)
        config = replace(CERTAIN, lattice_agreement=1.0)
        shares.append(label(folder, config, lattices=lattices).statistics["mean_transcript_share"])
        alone = digests(label(folder, CERTAIN))
        assert digests(label(folder, CERTAIN, lattices=lattices)) == alone
    right, wrong = shares
    assert 1 > right > wrong > 0


@given(st.integers(0, 2**32 - 1))
def test_overlap_is_one_less_the_total_variation(seed: int) -> None:
    """Of normalized distributions over six senones at five frames, at some of which is none."""
    generator = np.random.default_rng(seed)
    dense = generator.random((2, 5, 6)) * (generator.random((2, 5, 6)) < 0.5)
    # A frame's senone may be named twice.
    parts = [StatePosteriors(*np.nonzero(each), each[each > 0]) for each in dense]
    doubled = [
        StatePosteriors(*(np.concatenate([x, x]) for x in (p.frames, p.senones, p.probabilities)))
        for p in parts
    ]
    totals = dense.sum(axis=2, keepdims=True)
    normalized = dense / np.where(totals > 0, totals, 1)
    both = (totals > 0).all(axis=0)[:, 0]
    variation = np.abs(normalized[0] - normalized[1]).sum(axis=1) / 2
    expected = np.where(both, 1 - variation, 0)
    np.testing.assert_allclose(overlap(*parts, 5), expected, atol=1e-12)
    np.testing.assert_allclose(overlap(doubled[0], parts[1], 5), expected, atol=1e-12)
    np.testing.assert_allclose(overlap(parts[0], parts[0], 5), totals[0, :, 0] > 0, atol=1e-12)


def test_of_two_recognizers_words_the_spoken_one_is_aligned() -> None:
    """A word that both have is in the targets; of two words in one place it is the spoken one."""
    scores, numbers = spoken(["see", "cab", "sake"])
    config = TranscriptsConfig(max_garbage=1.0, garbage_cost=3.0)
    aligner = TranscriptAligner.of(toy_lexicon(), TREE, config)
    heard = (Hypothesis("a", "See be sake", -1.0), Hypothesis("b", "see cab sake.", -1.0))
    found = aligner.posteriors(heard, scores, aligner.config.garbage_cost)
    masses = np.bincount(found.frames, found.probabilities, minlength=len(scores))
    assert masses[numbers == 1].mean() > 0.9
    assert masses[numbers == 2].mean() > 0.9


def test_scores_are_probabilities() -> None:
    """Of a mean log-probability its exponential; a score beyond its range is of the other kind."""
    log, plain = TranscriptsConfig(), TranscriptsConfig(scores="probability")
    values = [(log, -1.0, np.exp(-1)), (log, 1e-6, 1.0), (log, None, 1.0)]
    values += [(plain, 0.25, 0.25), (plain, -1e-6, 0.0), (plain, 1 + 1e-6, 1.0)]
    for config, score, expected in values:
        assert confidence_of(Hypothesis("r", "a", score), config) == pytest.approx(expected)
    for config, score in ((log, 0.35), (plain, -0.2), (plain, 95.0)):
        with pytest.raises(UnusableTranscriptError, match=r"wrong_score: .*transcripts\.scores"):
            confidence_of(Hypothesis("r", "a", score), config)


def test_a_text_that_is_too_long_leaves_the_others() -> None:
    """Alone it is the reason. A score of another kind is that of all: it is no vote lost unseen."""
    aligner = TranscriptAligner.of(toy_lexicon(), TREE, TranscriptsConfig())
    good = Hypothesis("a", "see cab", -0.1)
    expected = len(aligner.graph((good,)).fst.states)
    other = Hypothesis("b", "cab " * (MAX_WORDS + 1))
    assert len(aligner.graph((other, good)).fst.states) == expected
    with pytest.raises(UnusableTranscriptError, match="too_long"):
        aligner.graph((other,))
    with pytest.raises(UnusableTranscriptError, match="wrong_score"):
        aligner.graph((Hypothesis("b", "cab", 0.98), good))


def test_words_again_and_again_have_a_graph_of_their_number() -> None:
    """As where a recognizer repeats itself; the graph of 28 such words once took minutes."""
    aligner = TranscriptAligner.of(toy_lexicon(), TREE, TranscriptsConfig())
    sizes = [
        len(aligner.graph((Hypothesis("r", "see a cab a " * number),)).fst.states)
        for number in (3, 6, 12)
    ]
    assert sizes[2] - sizes[1] == 2 * (sizes[1] - sizes[0])


def test_a_word_that_others_lack_need_not_be_known() -> None:
    """What one of three recognizers makes of noise takes the utterance from none."""
    aligner = TranscriptAligner.of(toy_lexicon(), TREE, TranscriptsConfig(max_unknown=0.0))
    heard = [Hypothesis(name, "a cab") for name in "pq"]
    aligner.graph((*heard, Hypothesis("r", "a um uh er cab")))
    with pytest.raises(UnusableTranscriptError, match="unknown_words"):
        aligner.graph((Hypothesis("r", "a um uh er cab"),))


def test_a_text_of_hours_is_not_joined() -> None:
    """Two of a hundred thousand words would take 40 GB."""
    aligner = TranscriptAligner.of(toy_lexicon(), TREE, TranscriptsConfig())
    with pytest.raises(UnusableTranscriptError, match="too_long: a text of more than 10000 words"):
        aligner.graph((Hypothesis("r", "a " * 10_001),))
