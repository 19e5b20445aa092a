"""Fits validated on development speakers: no bit of the training changes, and what is measured."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.store.object_store import ObjectStore
from pipeline.runs.manifest import Output, read_manifest
from pipeline.runs.names import ALIGNMENT_STEP, DEV_ALIGNMENT_STEP
from pipeline.shards import read_partition, write_partition
from tests.training.data.partition_rows import row
from tests.training.fit.small_fits import fit, partition, small_fit, write_run, write_step
from tests.training.models.test_contract import own
from tests.training.trainers.test_evaluated_model import assert_same
from training.data.dataset import Dataset
from training.data.minibatch import Minibatch
from training.data.row_order import CHUNK_FRAMES, spread_rows
from training.data.sub_epochs import Place, newest_place
from training.distributed.simulated_group import simulate_ranks
from training.fit.model_specs import Fit
from training.fit.steps import VALIDATION, validate
from training.fit.train_model import NOT_VALIDATED
from training.models.store import load_model, make_model
from training.settings.trainers import TRAINERS
from training.tensor_encoding import decode_state

IN_CI = ("htm", "ad_psgd")
"""test_evaluated_model.py says of every trainer that an evaluation changes no bit of it."""

VALIDATED = ("validation_cross_entropy", "validation_frame_accuracy")


def write_development(store: ObjectStore, run_uri: str) -> Output:
    """Four utterances of development speakers, aligned."""
    data = partition(soft=False, numbers=range(20, 24))
    write_step(store, run_uri, DEV_ALIGNMENT_STEP, data, 4)
    return read_manifest(store, run_uri, DEV_ALIGNMENT_STEP).outputs[0]


def last_state(folder: Path, what: Fit, rank: int) -> dict[str, Any]:
    """A rank's whole state at the end, without the learning curve."""
    (path,) = sorted((folder / "models" / what.name / "checkpoints").glob(f"*rank-0000{rank}*"))[
        -1:
    ]
    state: dict[str, Any] = decode_state(path.read_bytes())
    del state["curve"]
    return state


@pytest.mark.parametrize(
    "trainer",
    [name if name in IN_CI else pytest.param(name, marks=pytest.mark.chaos) for name in TRAINERS],
)
def test_validation_changes_no_bit_of_a_training(tmp_path: Path, trainer: str) -> None:
    """Model, optimizer, trainer, random numbers, bytes sent; the curve has two numbers more."""
    what = small_fit(trainer, student=True, group_size=2)
    # Of both kinds of targets, in chunks and on whole utterances.
    what = replace(what, sub_epochs=what.sub_epochs[:2] + what.sub_epochs[-2:])
    curves, states = [], []
    for name in ("without", "with"):
        store, run_uri = write_run(tmp_path / name)
        if name == "with":
            write_development(store, run_uri)
        results = simulate_ranks(4, fit, tmp_path / name, what)
        curves.append((results[0][0].statistics["curve"], results[0][1]))
        states.append([last_state(tmp_path / name, what, rank) for rank in range(4)])
    (without, model), (beside, same_model) = curves
    assert model == same_model
    assert_same(*states)
    for point, same in zip(without, beside, strict=True):
        assert set(same) - set(point) == set(VALIDATED)
        assert point == {name: same[name] for name in point}
    store, run_uri = ObjectStore((str(tmp_path / "with"),)), str(tmp_path / "with")
    assert all(point["validation_cross_entropy"] > 0 for point in beside)
    assert len({point["validation_cross_entropy"] for point in beside}) == len(beside)
    if trainer != "sparse_loco":  # which leaves with the largest changes of the last block alone
        # The last point is of the stored model, to rounding: ranks' sums are of another order.
        expected = validated(store, run_uri, what)
        assert {name: beside[-1][name] for name in VALIDATED} == pytest.approx(expected, rel=1e-5)


def validated(store: ObjectStore, run_uri: str, what: Fit) -> dict[str, float]:
    """Validate the stored model on what its fit was validated on."""
    model = load_model(store, run_uri, what.name, what.model).model
    development = tuple(read_manifest(store, run_uri, DEV_ALIGNMENT_STEP).outputs)
    dataset = Dataset(
        store, run_uri, (), (), 1, 64, 1, 0, 1, development=development, validation_ms=1
    )
    return simulate_ranks(1, lambda group: validate(model, dataset, group))[0]


def test_a_fit_without_other_speakers_says_so_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its curve has no validation; the aligner trains before development speakers are aligned."""
    what = small_fit()
    store, run_uri = write_run(tmp_path)
    manifest, _ = simulate_ranks(2, fit, tmp_path, what)[0]
    assert not set(VALIDATED) & set(manifest.statistics["curve"][0])
    assert capsys.readouterr().err.count(NOT_VALIDATED) == 1
    write_development(store, run_uri)
    aligner = replace(what, name="aligner", labelled="alignments/bootstrap")
    data = partition(soft=False)
    write_step(store, run_uri, aligner.labelled, data, senone_counts=[120] * 6)
    manifest, _ = simulate_ranks(1, fit, tmp_path, aligner)[0]
    assert not set(VALIDATED) & set(manifest.statistics["curve"][0])


def test_those_who_watch_read_the_last_measures(tmp_path: Path) -> None:
    """Of the sub-epoch before the newest checkpoint, by its record alone."""
    what = small_fit()
    store, run_uri = write_run(tmp_path)
    write_development(store, run_uri)
    manifest, _ = simulate_ranks(1, fit, tmp_path, what)[0]
    place = newest_place(store, run_uri, "models/baseline")
    point = manifest.statistics["curve"][-1]
    names = ("cross_entropy", "frame_accuracy", *VALIDATED)
    assert place == Place(len(what.sub_epochs), 0.0, {name: point[name] for name in names})
    assert json.dumps(place.measures)


def rows_of(speakers: dict[str, int]) -> bytes:
    """So many utterances of 0.9 s of each speaker."""
    rows = read_partition(partition(soft=False))
    names = [(speaker, n) for speaker, count in speakers.items() for n in range(count)]
    return write_partition(
        [
            replace(rows[0], utterance_id=f"{speaker}-{n}", speaker_id=speaker)
            for speaker, n in names
        ]
    )


def test_validation_is_bounded_and_evenly_from_the_speakers(tmp_path: Path) -> None:
    """Ranks read each chosen utterance once; more time adds utterances and removes none."""
    store, run_uri = write_run(tmp_path)
    speakers = {"ann": 9, "ben": 2, "cyd": 5}
    write_step(store, run_uri, DEV_ALIGNMENT_STEP, rows_of(speakers), 16)
    outputs = tuple(read_manifest(store, run_uri, DEV_ALIGNMENT_STEP).outputs)
    owners = [speaker for speaker, count in speakers.items() for _ in range(count)]
    before: set[int] = set()
    for number in range(1, 17):
        (chosen,) = spread_rows(store, run_uri, outputs, 900 * number).values()
        found = set(chosen.nonzero()[0].tolist())
        assert len(found) == number
        assert before < found
        counts = [sum(owners[row] == speaker for row in found) for speaker in speakers]
        most = max(counts)
        assert all(c >= min(most - 1, n) for c, n in zip(counts, speakers.values(), strict=True))
        before = found
    labelled = tuple(read_manifest(store, run_uri, ALIGNMENT_STEP).outputs)
    read: list[Minibatch] = []
    for rank in range(3):
        dataset = Dataset(
            store, run_uri, labelled, (), 1, 64, 1, rank, 3, development=outputs, validation_ms=4000
        )
        read += dataset.plan(VALIDATION, 0).minibatches()
    assert sum(each.num_frames for each in read) == 5 * 30  # of 0.9 s, the first above 4 s


def test_a_model_of_whole_utterances_is_validated_on_them(tmp_path: Path) -> None:
    """Its network never sees a piece of one; another's sees chunks alone."""
    store, run_uri = write_run(tmp_path)
    write_step(store, run_uri, DEV_ALIGNMENT_STEP, write_partition([row(20, 150)]), 1)
    outputs = tuple(read_manifest(store, run_uri, DEV_ALIGNMENT_STEP).outputs)
    dataset = Dataset(
        store, run_uri, (), (), 1, 64, 1, 0, 1, development=outputs, validation_ms=10_000
    )
    for is_whole in (False, True):
        seen: set[int] = set()
        model = make_model(own("tdnn", 2, whole_utterances=is_whole), 150)
        model.register_forward_pre_hook(lambda _, given, seen=seen: seen.update(given[1].tolist()))
        simulate_ranks(1, lambda group, model=model: validate(model, dataset, group))
        assert (max(seen) > CHUNK_FRAMES) == is_whole
