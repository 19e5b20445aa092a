"""Transcripts of labelled speech: counted once an utterance, and compared with the lexicon."""

from dataclasses import replace
from pathlib import Path

import pytest

from infra.store.object_store import ObjectStore
from pipeline.records import Tally, source_id, version_id
from pipeline.runs.commit import step_context
from pipeline.runs.engine import LossBudgetExceededError, StepSpec, run_step
from pipeline.runs.manifest import read_manifest
from pipeline.runs.names import ALIGNMENT_STEP, INGEST_STEP
from pipeline.shards import write_partition
from tests.training.decode.toy_language import LEXICON_TXT
from tests.training.sequence_training.toy_run import CONFIG as NETWORK
from tests.training.sequence_training.toy_run import NUM_ROWS, SCALE, finish, rows_of, write_toy_run
from training.align.labelled import labelled_transcripts, transcript_reads
from training.decode.corpus_lexicon import UnknownWords, similar_words
from training.decode.lexicon import Lexicon, parse_lexicon
from training.decode.ngrams import arpa_text
from training.decode.senones import SenoneTree
from training.distributed.simulated_group import simulate_ranks
from training.evaluate.graph_building import LanguageModelFiles
from training.sequence_training import lattices
from training.sequence_training.lattices import generate_lattices, weak_graph
from training.settings.decoding import EvaluationConfig, LatticeConfig

LEXICON = parse_lexicon(LEXICON_TXT)
PLACEMENTS = ("clean", "DP1", "DP3")
CONFIG = EvaluationConfig(ngram_order=3, acoustic_scale=0.3, beam=13.0, max_active=5000)
CHOICE = {"placements": PLACEMENTS, "count": 2}

Place = tuple[ObjectStore, str, str]


def write_versions(folder: Path, placements: tuple[str, ...]) -> Place:
    """Write the toy run's alignment again, each utterance in these placements."""
    store, run_uri, corpus_uri = write_toy_run(folder)
    (folder / "run" / ALIGNMENT_STEP / "manifest.json").unlink()
    context = step_context(store, run_uri, ALIGNMENT_STEP, {}, {})
    parts = []
    for partition in range(len(NUM_ROWS)):
        # Versions of an utterance are shuffled apart; here each placement is a shard.
        for name in placements:
            rows = [
                replace(row, utterance_id=version_id(row.utterance_id, name))
                for row in rows_of(partition)
            ]
            tally = Tally(len(rows), sum(row.duration_ms for row in rows))
            task = f"{len(parts):06d}"
            parts.append(context.put_output(task, ".parquet", write_partition(rows), tally))
    total = sum((part.tally for part in parts), Tally())
    finish(store, run_uri, ALIGNMENT_STEP, total, tuple(parts))
    return store, run_uri, corpus_uri


def write_ingest(place: Place, config: dict) -> None:
    """Write the manifest of an ingest with this configuration."""
    spec = StepSpec(*place[:2], INGEST_STEP, config)
    run_step(spec, lambda step: step.lossless(Tally()))


def arpa_of(place: Place, smoothing: str) -> str:
    store, run_uri, _ = place
    config = replace(CONFIG, smoothing=smoothing)
    model = LanguageModelFiles({}).model(store, run_uri, LEXICON, config)
    return arpa_text(model.of_order(config.ngram_order))


@pytest.mark.parametrize("smoothing", ["witten_bell", "kneser_ney"])
def test_placements_leave_the_language_model_as_it_is(tmp_path: Path, smoothing: str) -> None:
    """The ARPA is equal text; counted once a version, it would be another."""
    plain = write_toy_run(tmp_path / "plain")
    placed = write_versions(tmp_path / "placed", PLACEMENTS)
    assert arpa_of(placed, smoothing) != arpa_of(plain, smoothing)
    write_ingest(placed, {"placements": {"training": CHOICE, "heldout": CHOICE, "seed": 0}})
    assert arpa_of(placed, smoothing) == arpa_of(plain, smoothing)


def test_unknown_words_are_words_of_lattices_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """References need their path; the model that hypotheses are searched with has a gap there."""
    place = write_toy_run(tmp_path)
    known = {word: spelled for word, spelled in LEXICON.pronunciations.items() if word != "see"}
    noisy = Lexicon(known).with_spoken_noise()
    model = LanguageModelFiles({}).model(*place[:2], noisy, CONFIG)
    assert {*model.of_order(2).words} == {*known, "<s>", "</s>"}
    tree = SenoneTree(noisy.phones, tuple(range(len(noisy.phones))))
    monkeypatch.setattr(lattices, "read_tree", lambda *_: tree)
    words = weak_graph(*place[:2], noisy, 2).words
    assert {*words} >= {*known, "<unk>"}
    assert "see" not in words


def test_ids_that_only_look_like_versions_count_apart(tmp_path: Path) -> None:
    """Without an ingest that simulated, ids mean nothing, and no other input is read."""
    placed = write_versions(tmp_path, PLACEMENTS)
    store, run_uri, _ = placed
    assert len(labelled_transcripts(store, run_uri)) == 3 * sum(NUM_ROWS)
    assert transcript_reads(store, run_uri) == []
    write_ingest(placed, {"dev_share": 0.1})
    assert len(labelled_transcripts(store, run_uri)) == 3 * sum(NUM_ROWS)
    assert transcript_reads(store, run_uri) == []


def test_ingest_is_an_input_of_what_counts_its_versions(tmp_path: Path) -> None:
    """So that other placements are other work, of lattices here."""
    place = write_toy_run(tmp_path)
    write_ingest(place, {"placements": {"training": CHOICE, "heldout": CHOICE, "seed": 0}})
    weak = LatticeConfig(ngram_order=1, beam=30.0, lattice_beam=8.0)
    what = "baseline", NETWORK, weak, SCALE, 0.2
    simulate_ranks(1, lambda group: generate_lattices(*place, *what, group))
    manifest = read_manifest(*place[:2], "lattices/baseline")
    assert INGEST_STEP in manifest.inputs


@pytest.mark.parametrize("utterance_id", ["ann-1", "ann", "ann-1-DP3", "-DP1", "ann-DP", "é-clean"])
def test_a_version_names_its_source(utterance_id: str) -> None:
    """Also where the source's own id ends as a version's does."""
    for placement in PLACEMENTS:
        assert source_id(version_id(utterance_id, placement), PLACEMENTS) == utterance_id
    assert source_id("ann-1-DP2", PLACEMENTS) == "ann-1-DP2"
    assert source_id("ann-1DP3", PLACEMENTS) == "ann-1DP3"


SMALL_LEXICON = parse_lexicon("YES Y EH S\nDON'T D OW N T\nCAF\u00c9 K AE F EY\n")


def test_words_and_utterances_are_counted_by_frequency() -> None:
    """An utterance counts once however often it has a word; the most frequent words come first."""
    unknown = UnknownWords.of(["YES NO NO", "NO", "OH YES", "YES", ""], SMALL_LEXICON)
    said = "lexicon.txt lacks 2 words, in 3 of 5 labelled utterances: 'NO', 'OH'; "
    assert (
        unknown.note(SMALL_LEXICON, "labelled", "row")
        == f"{said}these utterances will not be aligned"
    )
    noisy = SMALL_LEXICON.with_spoken_noise()
    assert unknown.note(noisy, "labelled", "row") == f"{said}they are aligned as SPN"
    assert unknown.note(noisy, "heldout", "row").endswith("'OH'; they count as errors")
    assert UnknownWords.of(["YES"], SMALL_LEXICON).note(SMALL_LEXICON, "labelled", "row") == ""


@pytest.mark.parametrize(
    ("word", "known"),
    [
        ("yes", "YES"),
        ("DON\u2019T", "DON'T"),
        ("don`t", "DON'T"),
        ("CAFE\u0301", "CAF\u00c9"),
        ("YES\u200b", "YES"),
        ("\uff39\uff25\uff33", "YES"),
    ],
)
def test_another_spelling_of_the_word_is_named(word: str, known: str) -> None:
    """Case, apostrophe, Unicode's form, and characters that cannot be seen."""
    assert similar_words([word, "NO"], SMALL_LEXICON) == {word: known}
    said = UnknownWords.of([f"YES {word}"], SMALL_LEXICON).note(SMALL_LEXICON, "labelled", "row")
    assert f"{word!r} (it has {known!r})" in said


def test_the_loss_budget_bounds_utterances_that_are_not_aligned() -> None:
    """Those with spoken noise are aligned, but not by a lexicon of other words altogether."""
    unknown, noisy = (
        UnknownWords.of(["YES", "NO YES"], SMALL_LEXICON),
        SMALL_LEXICON.with_spoken_noise(),
    )
    unknown.check_loss(SMALL_LEXICON, "labelled", 0.5, "row")
    unknown.check_loss(noisy, "labelled", 0.0, "row")
    with pytest.raises(LossBudgetExceededError, match=r"in 1 of 2 .*'NO'; the loss budget is 40"):
        unknown.check_loss(SMALL_LEXICON, "labelled", 0.4, "row")
    with pytest.raises(LossBudgetExceededError, match=r"give the lexicon of these transcripts"):
        UnknownWords.of(["yes", "don't"], SMALL_LEXICON).check_loss(noisy, "labelled", 0.9, "row")
