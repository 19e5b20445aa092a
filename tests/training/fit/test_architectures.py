"""Any architecture is trained, resumed, trained on, checked and evaluated as the LSTMs are."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from pipeline.runs.names import BASELINE
from tests.job_programs import RunJob, Said
from tests.training.decode.toy_language import toy_lexicon
from tests.training.decode.whole_graphs import decoding_graph, witten_bell_arpa
from tests.training.fit import small_fits
from tests.training.fit.small_fits import copy_stopped, small_fit, write_run
from tests.training.fit.test_sequence_training import BEAMS
from tests.training.fit.test_sequence_training import fit as fit_on
from tests.training.sequence_training.toy_run import (
    SCALE,
    TREE,
    UNREADABLE,
    rows_of,
    smbr_fit,
    write_toy_run,
)
from tests.whole_path.processes import TINY
from training.align.network_alignment import log_likelihoods
from training.decode.decoder import DecoderConfig, decode
from training.distributed import process_group
from training.distributed.simulated_group import simulate_ranks
from training.evaluate.word_errors import WordErrors, word_errors
from training.fit import steps
from training.fit.steps import GradientGraphs, gradients_of
from training.models.store import load_model, make_model
from training.sequence_training.lattices import generate_lattices
from training.settings.models import ConformerConfig, FactoryConfig, LstmConfig
from training.settings.recipe import CheckpointConfig

README = Path(__file__).parents[3] / "training" / "models" / "README.md"
CONFORMER = ConformerConfig(num_layers=2, num_units=12, num_heads=3, dropout=0.1)
OWN = FactoryConfig(
    factory="tests.training.models.own_models:tdnn", look_ahead=2, settings={"num_units": 8}
)


def block(language: str) -> str:
    """The one example of a language in the guide."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.M | re.S)
    return found


def test_training_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    """On two ranks, from chunks and whole utterances, hard and soft targets, after a warm start."""
    write_run(tmp_path / "run")
    often = CheckpointConfig(steps=3, num_kept=100)
    baseline = replace(small_fit("htm", group_size=2), model=CONFORMER)
    student = small_fit("htm", student=True, group_size=2, checkpoints=often)
    student = replace(student, model=CONFORMER, warm_start=BASELINE)
    simulate_ranks(2, small_fits.fit, tmp_path / "run", baseline)
    manifest, data = simulate_ranks(2, small_fits.fit, tmp_path / "run", student)[0]
    losses = [point["cross_entropy"] for point in manifest.statistics["curve"]]
    assert losses[-1] < 0.9 * losses[0]
    copy_stopped(tmp_path / "run", student, 6, tmp_path / "stopped")
    assert simulate_ranks(2, small_fits.fit, tmp_path / "stopped", student)[0][1] == data


def test_a_conformer_is_trained_on_by_smbr(tmp_path: Path) -> None:
    """Its lattices are of its own logits, which no delay shifts."""
    store, run_uri, corpus_uri = write_toy_run(tmp_path, BASELINE, CONFORMER)
    with process_group.open_world() as group:
        place = store, run_uri, corpus_uri
        generate_lattices(*place, BASELINE, CONFORMER, BEAMS, SCALE, 0.2, group)
        manifest, _ = fit_on(group, Path(run_uri), smbr_fit("gtc", config=CONFORMER))
    curve = [point["expected_frame_accuracy"] for point in manifest.statistics["curve"]]
    assert curve[-1] > curve[0]


def check(run_job: RunJob, model: str) -> Said:
    return run_job(
        *("check", "--recipe", str(TINY), "--run", "runs/x"), *("--set", f"models.student={model}")
    )


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FactoryConfig:
    """The guide's module and recipe, as a user would copy them."""
    (tmp_path / "my_models.py").write_text(block("python"))
    monkeypatch.syspath_prepend(tmp_path)
    return FactoryConfig(
        factory="my_models:TimeDelayNetwork", look_ahead=3, settings={"num_units": 16}
    )


def test_the_guides_example_is_checked(run_job: RunJob, example: FactoryConfig) -> None:
    """As the guide's recipe names it; what is wrong with it has one line and exit code 2."""
    table = ", ".join(line for line in block("toml").splitlines()[1:])
    assert example.factory in table
    assert check(run_job, f"{{{table}}}") == Said(0, "check: tiny: all is well\n", "")
    for wrong, message in (
        (table.replace("ahead = 3", "ahead = 2"), "models: aligner: look_ahead = 2: the logits"),
        (table.replace("num_units", "num_unit"), "unknown key num_unit: did you mean num_units?"),
        (table.replace("my_models", "no_models"), "No module named 'no_models': need a module"),
    ):
        said = check(run_job, f"{{{wrong}}}")
        assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
        assert message in said.err


def test_the_guides_example_recognizes_words(tmp_path: Path, example: FactoryConfig) -> None:
    """Trained, stored, loaded, decoded: at most one word in five of its training is wrong."""
    store, run_uri, _ = write_toy_run(tmp_path, BASELINE, example)
    model = load_model(store, run_uri, BASELINE, example)
    rows = [row for row in rows_of(0) if row.utterance_id != UNREADABLE]
    sentences = [(row.text or "").split() for row in rows]
    lexicon = toy_lexicon()
    graph = decoding_graph(lexicon, TREE, witten_bell_arpa(sentences, lexicon.pronunciations, 2))
    errors = WordErrors()
    for row, words in zip(rows, sentences, strict=True):
        (scores,) = log_likelihoods([row], model, SCALE)
        errors += word_errors(words, decode(graph, scores, DecoderConfig(20.0, 500)))
    assert errors.word_error_rate <= 20


def test_graphs_are_for_models_that_ignore_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph repeats one minibatch's mask: other architectures take their steps without."""
    monkeypatch.setattr(steps, "is_captured_on", lambda _: True)
    forms = [LstmConfig(1, 4, False, 1, 0.0), LstmConfig(1, 4, True, 0, 0.0), CONFORMER, OWN]
    loop = small_fit().training
    made = [gradients_of(make_model(form, 5), loop) for form in forms]
    assert [isinstance(each, GradientGraphs) for each in made] == [True, False, False, False]
    assert [isinstance(each, partial) for each in made] == [False, True, True, True]
