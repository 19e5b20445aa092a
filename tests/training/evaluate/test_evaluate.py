"""An evaluation decodes each utterance once with each model, keeps all of it, and resumes."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.runs.manifest import Manifest, read_manifest
from tests.small_corpus import killed_at, serially
from tests.training.evaluate.oracle_run import (
    CONFIG,
    LISTENS_FROM,
    MODELS,
    OracleRun,
    heldout_rows,
    row,
    scores_of,
    write_oracle_run,
)
from training.decode.decoder import FoundLattice, decode
from training.evaluate import slices
from training.evaluate.heldout import evaluate
from training.evaluate.slices import ModelsToDecode
from training.evaluate.word_errors import read_errors, word_errors

SCLITE = Path(shutil.which("sclite") or "/usr/lib/sctk/bin/sclite")


def run_evaluation(run: OracleRun, distribute=serially) -> Manifest:
    models = ModelsToDecode(MODELS, distribute)
    return evaluate(*run.place, CONFIG, models).manifest


def files_of(run: OracleRun) -> dict[str, bytes]:
    """Return the contents of the files for other tools, by name."""
    listed = scores_of(run)["files"]
    return {name: run.store.get(f"{run.run_uri}/{key}") for name, key in listed.items()}


def trn(data: bytes) -> dict[str, list[str]]:
    """Read a trn file as sclite does: words, then the utterance in brackets."""
    lines = [re.fullmatch(r"(.*?) ?\((\S+)\)", line) for line in data.decode().splitlines()]
    return {line[2]: line[1].split() for line in lines}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OracleRun]:
    """Return an evaluated run, which tests only read."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        run = write_oracle_run(tmp_path_factory.mktemp("run"), monkeypatch, heldout_rows())
        run_evaluation(run)
        yield run


def test_every_word_is_scored_as_the_files_say(run: OracleRun) -> None:
    """Rates are those of the trn files; no utterance and no word is lost."""
    manifest = read_manifest(run.store, run.run_uri, "evaluation")
    scores, files = scores_of(run), files_of(run)
    rows = {f"s%5F{r.speaker_id[2:]}-{r.utterance_id}": r for r in heldout_rows()}
    references = trn(files["reference.trn"])
    assert references == {name: (each.text or "").split() for name, each in rows.items()}
    for model in MODELS:
        found = trn(files[f"{model}.trn"])
        assert found.keys() == references.keys()
        for name, words in found.items():
            heard = rows[name].features[0, 1] < LISTENS_FROM[model]
            assert words == (references[name] if heard else []), (model, name)
        for placement in ("DP1", "DP2"):
            some = [name for name, each in rows.items() if each.placement == placement]
            errors = sum(word_errors(references[name], found[name]).errors for name in some)
            counts = scores["word_errors"][model][placement]
            assert errors == sum(counts[k] for k in ("substitutions", "insertions", "deletions"))
            assert counts["reference_words"] == sum(len(references[name]) for name in some)
    assert manifest.tally_in == manifest.tally_out
    assert manifest.tally_out.utterances == len(rows)
    by_utterance = read_errors(files["errors.jsonl"])
    assert {each.utterance_id for each in by_utterance} == {r.utterance_id for r in rows.values()}
    pooled = scores["statistics"]["pooled"]
    (of_student,) = [c for c in pooled["comparisons"] if c["system"] == "student"]
    assert of_student["baseline"] == "baseline"
    assert of_student["reduction"]["value"] > 0
    assert pooled["num_speakers"] == len(scores["speakers"]) == 4


@pytest.mark.cluster
@pytest.mark.skipif(not SCLITE.exists(), reason="run tests/install_packages.sh as root")
def test_sclite_counts_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NIST's scorer finds each speaker's errors in trn and ctm, whatever marks are in names."""
    rows = heldout_rows()[:6]
    rows[3] = replace(rows[3], utterance_id="odd (name) {a}/b;;", speaker_id="sp-k_er 1")
    rows[4] = replace(rows[4], text="see (a) {x/y} %b <c> @ ;;z")
    run = write_oracle_run(tmp_path, monkeypatch, rows)
    run_evaluation(run)
    for name, data in files_of(run).items():
        (tmp_path / name).write_bytes(data)
    total = sum(each["errors"]["student"] for each in scores_of(run)["speakers"].values())
    for kind, reference in (("trn", "trn"), ("ctm", "stm")):
        pair = ["-r", f"reference.{reference}", reference, "-h", f"student.{kind}", kind]
        said = subprocess.run(
            [SCLITE, "-s", "-i", "spu_id", "-o", "rsum", "stdout", "-f", "0", *pair],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        (summed,) = re.findall(r"^ *\| Sum +\|.*$", said, re.MULTILINE)
        assert int(summed.split()[10]) == total > 0


def test_words_have_times_in_order(run: OracleRun) -> None:
    """Every decoded word is in the ctm, within its utterance, after the word before it."""
    files = files_of(run)
    lengths = {each.utterance_id: each.duration_ms / 1000 for each in heldout_rows()}
    for model in MODELS:
        spoken: dict[str, list[str]] = {}
        ends: dict[str, float] = {}
        lines = [line.split() for line in files[f"{model}.ctm"].decode().splitlines()]
        assert [line[0] for line in lines] == sorted(line[0] for line in lines)
        for name, channel, start, duration, word, confidence in lines:
            assert channel == "1"
            assert float(start) >= ends.get(name, 0.0) - 1e-9
            ends[name] = float(start) + float(duration)
            assert ends[name] <= lengths[name] + 1e-9
            assert float(duration) > 0
            # The senones are sure; where a word's label is, is less so.
            assert 0.8 < float(confidence) < 1
            spoken.setdefault(name, []).append(word)
        of_trn = {k.partition("-")[2]: v for k, v in trn(files[f"{model}.trn"]).items() if v}
        assert spoken == of_trn
    stm = files["reference.stm"].decode().splitlines()
    assert stm[0] == "u-00 1 s%5F0 0.00 0.72 see a cab"
    assert len(stm) == len(lengths)


def test_logits_are_computed_once(run: OracleRun) -> None:
    """A model hears each utterance once, for words, frames and the transcripts' alignment."""
    assert len(run.heard) == len(MODELS) * len({r.features.tobytes() for r in heldout_rows()})
    copies = sum(run.heard.values())
    assert copies == len(MODELS) * len(heldout_rows())


def test_frames_are_held_against_the_teachers_alignment(run: OracleRun) -> None:
    """The teacher hears all senones; who hears silence in an utterance has few frames right."""
    accuracy = scores_of(run)["frame_accuracy"]
    for placement in ("DP1", "DP2"):
        rates = [accuracy[model][placement] for model in ("baseline", "student", "teacher")]
        assert rates == sorted(rates)
        assert rates[2] == 100
        assert rates[0] < 60


def test_a_killed_evaluation_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever it was killed, the manifest is the undisturbed one, and no task ran twice."""
    monkeypatch.setattr(slices, "SLICE_MS", 4000)
    undisturbed = write_oracle_run(tmp_path / "once", monkeypatch, heldout_rows())
    expected = run_evaluation(undisturbed)
    num_tasks = len(undisturbed.store_keys("evaluation/scratch/commits"))
    assert num_tasks == 3 * 4
    for number in (3, num_tasks - 1):
        run = write_oracle_run(tmp_path / f"killed-{number}", monkeypatch, heldout_rows())
        with pytest.raises(KeyboardInterrupt):
            run_evaluation(run, killed_at(number + 1))
        assert run_evaluation(run).to_bytes() == expected.to_bytes()
        assert run.heard == undisturbed.heard


def test_slices_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One task a shard or one an utterance: the same scores and files, to the byte."""
    found, rows = [], heldout_rows()[:10]
    for number, milliseconds in enumerate((10**9, 1)):
        monkeypatch.setattr(slices, "SLICE_MS", milliseconds)
        run = write_oracle_run(tmp_path / str(number), monkeypatch, rows)
        found.append(run_evaluation(run).to_bytes())
        num_tasks = len(run.store_keys("evaluation/scratch/commits"))
        assert num_tasks == 3 * (2 if milliseconds > 1 else len(rows))
    assert found[0] == found[1]


def test_long_utterances_are_decoded_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words of all pieces are one hypothesis, with times of the whole; memory holds a piece."""
    monkeypatch.setattr(slices, "MAX_PIECE_FRAMES", 15)
    # Silence, two phones and two silences take three low-rate frames each: 15 in all.
    first, second = (row(0, [word], "s") for word in ("see", "bee"))
    both = np.concatenate([first.features, first.features[-9:], second.features])
    long = replace(first, text="see bee", duration_ms=10 * len(both), features=both)
    run = write_oracle_run(tmp_path, monkeypatch, [long, row(1, ["a"], "t")])
    run_evaluation(run)
    files = files_of(run)
    assert trn(files["teacher.trn"])["s-u-00"] == ["see", "bee"]
    lines = [line.split()[2:5] for line in files["teacher.ctm"].decode().splitlines()]
    assert lines[0][2] == "see"
    assert lines[1][2] == "bee"
    assert float(lines[1][0]) >= 0.45
    assert scores_of(run)["word_errors"]["teacher"]["DP1"]["reference_words"] == 2


def test_a_failed_search_has_deleted_all_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a path the utterance remains: its words are deletions, and the failure is counted."""
    search = slices.find_lattice
    rows = heldout_rows()[:8]
    run = write_oracle_run(tmp_path, monkeypatch, rows)

    def failing(graph, log_likelihoods, config) -> FoundLattice | None:
        if "sake" in decode(graph, log_likelihoods, config):
            return None
        return search(graph, log_likelihoods, config)

    monkeypatch.setattr(slices, "find_lattice", failing)
    manifest = run_evaluation(run)
    scores = scores_of(run)
    failed = [r for r in rows if "sake" in (r.text or "")]
    assert scores["failed_searches"]["teacher"] == len(failed) > 0
    deleted = [each["deletions"] for each in scores["word_errors"]["teacher"].values()]
    assert sum(deleted) == 2 * len(failed)
    words = [each["reference_words"] for each in scores["word_errors"]["teacher"].values()]
    assert sum(words) == sum(len((r.text or "").split()) for r in rows)
    assert manifest.quarantined.utterances == 0
    assert {each["word_errors"]["deletions"] for each in scores["worst"]["utterances"]} <= {2, 3}


def test_words_outside_the_lexicon_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A held-out transcript may have a word that no model can write: an error, and no failure."""
    rows = [replace(row(0, ["see", "a"], "s"), text="see wasp"), row(1, ["a"], "t")]
    run = write_oracle_run(tmp_path, monkeypatch, rows)
    manifest = run_evaluation(run)
    assert manifest.statistics["num_unknown_words"] == 1
    assert scores_of(run)["out_of_vocabulary"] == {
        "num_words": 3,
        "num_unknown": 1,
        "num_types": 3,
        "num_unknown_types": 1,
    }
    scores = scores_of(run)
    assert scores["word_errors"]["teacher"]["DP1"]["substitutions"] == 1
    assert "DP1" not in scores["frame_accuracy"]["teacher"]  # nothing there is aligned
    (worst,) = scores["worst"]["utterances"]
    assert worst["words"] == [["see", "see"], ["wasp", "a"]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"the heldout subset is empty: list speakers in heldout\.speakers"),
        (
            [replace(row(0, ["a"], "s"), text=None)],
            r"the heldout subset has no words: list others in heldout\.speakers",
        ),
    ],
)
def test_nothing_to_score_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list, message: str
) -> None:
    """A subset without utterances, or without words, is named with its list."""
    run = write_oracle_run(tmp_path, monkeypatch, rows)
    with pytest.raises(ValueError, match=message):
        run_evaluation(run)
