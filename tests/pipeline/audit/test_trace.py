"""Every utterance of a run can be followed from step to step, and none is made up."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra.store.object_store import ObjectStore, join_uri
from jobs.run_table import utterance_reads
from pipeline.audit.trace import StepTrace, Trace, UnknownUtteranceError, trace
from pipeline.kbest import KBest, OwnKBest
from pipeline.runs.engine import WITHOUT_LATTICE
from pipeline.runs.manifest import Manifest, manifest_uri, read_manifest, sha256
from pipeline.runs.names import DEV_ALIGNMENT_STEP
from pipeline.settings import TargetsConfig
from pipeline.shards import read_features, read_partition, read_targets
from pipeline.splicing import splice
from pipeline.steps.targets import generate_targets
from tests.four_steps import label
from tests.in_process_teacher import teacher_of
from tests.pipeline.runs.small_commits import set_small_bounds
from tests.pipeline.steps.increments import nights as small_nights
from tests.pipeline.steps.increments.nights import Nights
from tests.small_corpus import serially
from tests.small_run import (
    BAD_AUDIO,
    BAD_METADATA,
    SEED,
    SUBSET,
    copy_run,
    make_run,
    outputs,
    selected_ids,
    spoilt,
)
from tests.whole_path.processes import TINY
from training.settings.recipe import read_recipe

Run = tuple[ObjectStore, str]
READS = utterance_reads(read_recipe(str(TINY)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A whole run."""
    return make_run(tmp_path_factory.mktemp("run"))


def follow(run: Run, utterance_id: str) -> tuple[Trace, dict[str, StepTrace]]:
    store, run_uri = run
    traced = trace(store, run_uri, join_uri(run_uri, "corpus"), utterance_id, READS)
    return traced, {each.step.partition("/")[0]: each for each in traced.steps}


def read(run: Run, step: StepTrace) -> bytes:
    return run[0].get(join_uri(run[1], step.object))


def test_every_good_utterance_is_found_where_it_is(run: Run) -> None:
    """Line by line and row by row, what is there is that utterance; its audio is unchanged."""
    store, run_uri = run
    for utterance_id in set(selected_ids(store, run_uri)) - {spoilt(store, run_uri)}:
        traced, seen = follow(run, utterance_id)
        assert list(seen) == ["metadata", "selection", "features", "targets", "partitions"]
        metadata = store.get(join_uri(run_uri, "corpus", seen["metadata"].object)).splitlines()
        assert json.loads(metadata[position(seen["metadata"]) - 1])["utterance_id"] == utterance_id
        line = read(run, seen["selection"]).splitlines()[position(seen["selection"]) - 1]
        assert json.loads(line)["utterance_id"] == utterance_id
        for step, reader in (
            ("features", read_features),
            ("targets", read_targets),
            ("partitions", read_partition),
        ):
            row = reader(read(run, seen[step]))[position(seen[step])]
            assert row.utterance_id == utterance_id
        assert traced.audio["unchanged"]
        assert traced.audio["recorded_etag"] == seen["features"].facts["audio_etag"]


def position(step: StepTrace) -> int:
    assert step.position is not None
    return step.position


def test_each_step_tells_what_made_it(run: Run) -> None:
    """Its configuration's digest and the version of the code, as in its manifest."""
    store, run_uri = run
    _, seen = follow(run, selected_ids(store, run_uri)[0])
    for step in ("selection", "features", "targets", "partitions"):
        manifest = read_manifest(store, run_uri, f"{step}/{SUBSET}")
        document = json.loads(store.get(manifest_uri(run_uri, f"{step}/{SUBSET}")))
        assert seen[step].config_digest == document["config_digest"]
        assert seen[step].code_version == manifest.code_version
    assert seen["targets"].facts["k"] == 4
    assert seen["targets"].facts["offset"] in {0, 1, 2}


def test_what_is_bad_ends_in_a_ledger(run: Run) -> None:
    """A reason and the ledger's line, of audio as it is now; of a record before the cutoff."""
    store, run_uri = run
    traced, seen = follow(run, spoilt(store, run_uri))
    assert list(seen) == ["metadata", "selection", "features"]
    assert seen["features"].outcome == "quarantined"
    assert seen["features"].facts["reason"] == "not_audio"
    line = read(run, seen["features"]).splitlines()[position(seen["features"]) - 1]
    assert json.loads(line)["utterance_id"] == spoilt(store, run_uri)
    assert traced.audio["num_bytes"] == len(BAD_AUDIO)
    _, seen = follow(run, BAD_METADATA)
    assert list(seen) == ["metadata", "selection"]
    assert seen["selection"].facts["reason"] == "bad_duration"


def test_an_unselected_utterance_says_so(run: Run) -> None:
    """It was read, and is over the budget."""
    store, run_uri = run
    every = {
        f"unlabelled-{speaker:02d}-{number:03d}" for speaker in range(6) for number in range(5)
    }
    for utterance_id in every - set(selected_ids(store, run_uri)):
        _, seen = follow(run, utterance_id)
        assert list(seen) == ["metadata", "selection"]
        assert seen["selection"].outcome == "not selected"
        assert "over the budget" in seen["selection"].facts["why"]


@pytest.mark.parametrize("utterance_id", ["nobody", "unlabelled-00", "", "a/b é"])
def test_an_unknown_utterance_is_an_error(run: Run, utterance_id: str) -> None:
    """It names where it was looked for; half an id is none."""
    with pytest.raises(UnknownUtteranceError, match=r"no utterance .* in the metadata of .*corpus"):
        follow(run, utterance_id)


def test_changed_and_missing_audio_are_reported(run: Run, tmp_path: Path) -> None:
    """The ETag then is the features' own, whatever lies there now."""
    store, run_uri = copied = copy_run(run[1], tmp_path)
    utterance_id = selected_ids(store, run_uri)[0]
    uri = join_uri(run_uri, "corpus", "audio", f"{utterance_id}.flac")
    store.put(uri, store.get(uri) + b"\0")
    assert follow(copied, utterance_id)[0].audio["unchanged"] is False
    store.delete(uri)
    assert "no such object" in follow(copied, utterance_id)[0].audio["now"]


def test_a_run_under_way_is_followed_as_far_as_it_is(run: Run, tmp_path: Path) -> None:
    """A step without its manifest is not finished."""
    store, run_uri = copied = copy_run(run[1], tmp_path)
    utterance_id = selected_ids(store, run_uri)[0]
    store.delete(manifest_uri(run_uri, f"partitions/{SUBSET}"))
    assert follow(copied, utterance_id)[1]["partitions"].outcome == "step not finished"
    store.delete(manifest_uri(run_uri, f"selection/{SUBSET}"))
    assert follow(copied, utterance_id)[1]["selection"].outcome == "step not finished"


def test_models_that_saw_it_are_named(run: Run, tmp_path: Path) -> None:
    """A model trained on the partitions, one that has only its moments, and one of neither."""
    store, run_uri = copied = copy_run(run[1], tmp_path)
    inputs = {
        "student": [f"partitions/{SUBSET}", f"features/{SUBSET}"],
        "baseline": [f"features/{SUBSET}"],
        "other": ["features/labelled"],
    }
    for name, steps in inputs.items():
        manifest = Manifest(f"models/{name}", {}, dict.fromkeys(steps, sha256(b"")), ())
        store.put(manifest_uri(run_uri, f"models/{name}"), manifest.to_bytes())
    assert follow(copied, selected_ids(store, run_uri)[0])[0].models == {
        "baseline": "only its normalization",
        "student": f"trained on partitions/{SUBSET}",
    }


def test_a_development_utterance_is_heard_by_the_validation_loss_alone(
    run: Run, tmp_path: Path
) -> None:
    """Newbob's alignment of the development speakers is an input, and nothing to train on."""
    store, run_uri = as_development(run, tmp_path)
    inputs = {"teacher": [DEV_ALIGNMENT_STEP, "features/labelled"], "student": ["features/dev"]}
    for name, steps in inputs.items():
        manifest = Manifest(f"models/{name}", {}, dict.fromkeys(steps, sha256(b"")), ())
        store.put(manifest_uri(run_uri, f"models/{name}"), manifest.to_bytes())
    utterance_id = selected_ids(*run)[0]
    traced, seen = follow((store, run_uri), utterance_id)
    assert seen["alignments"].outcome == "written"
    assert traced.models == {
        "student": "only its normalization",
        "teacher": "only its validation loss, on alignments/dev",
    }


def as_development(run: Run, folder: Path) -> Run:
    """Copy a run, with its unlabelled speakers as development speakers, targets as alignments."""
    store, run_uri = run
    new = ObjectStore((str(folder),))

    def renamed(key: str) -> str:
        return key.replace(f"targets/{SUBSET}", DEV_ALIGNMENT_STEP).replace(f"/{SUBSET}", "/dev")

    for found in store.list(run_uri):
        if "/commits/" in found.uri:
            continue  # they have the old names
        data = store.get(found.uri)
        if found.uri.endswith(f"/{SUBSET}/manifest.json"):
            manifest = Manifest.from_bytes(data)
            objects: dict[str, Any] = {
                name: tuple(replace(o, key=renamed(o.key)) for o in getattr(manifest, name))
                for name in ("outputs", "ledgers", "id_index")
            }
            data = replace(manifest, step=renamed(manifest.step), **objects).to_bytes()
        new.put(join_uri(str(folder), renamed(found.uri.removeprefix(run_uri))), data)
    return new, str(folder)


def test_an_utterance_without_a_lattice_says_why(run: Run, tmp_path: Path) -> None:
    """Its targets are the teacher's own, with reason and detail; other utterances say nothing."""
    store, run_uri = copy_run(run[1], tmp_path)
    shutil.rmtree(Path(run_uri) / "targets")
    chosen, other = sorted(set(selected_ids(store, run_uri)) - {spoilt(store, run_uri)})[:2]
    (frames,) = [
        row.features
        for output in outputs(store, run_uri, "features")
        for row in read_features(store.get(join_uri(run_uri, output.key)))
        if row.utterance_id == chosen
    ]

    def search(given: np.ndarray) -> KBest:
        own = label(given)
        is_chosen = any(np.array_equal(splice(frames, offset), given) for offset in range(3))
        return OwnKBest.of(own, WITHOUT_LATTICE, "lattice_failed", "too long") if is_chosen else own

    config = TargetsConfig(4, 100, SEED)
    generate_targets(store, run_uri, config, teacher_of(search), serially, loss_budget=0.1)
    _, seen = follow((store, run_uri), chosen)
    assert seen["targets"].outcome == "written"
    assert seen["targets"].facts["without_lattice"] == "lattice_failed: too long"
    assert "without_lattice" not in follow((store, run_uri), other)[1]["targets"].facts


SPEAKERS = ["ann", "bert", "clara", "doris"]
FILES = ("selection", "features", "targets")


@pytest.mark.parametrize("max_listed", [4_000, 2])
def test_only_the_shards_of_an_increment_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_listed: int
) -> None:
    """Those of the base, and all others of the increment, may be gone; with manifests in parts."""
    monkeypatch.setattr(small_nights, "FILE_HOURS", 1 / 3600)
    if max_listed < 4_000:
        set_small_bounds(monkeypatch, max_listed)
    nights = Nights.at(str(tmp_path))
    for name, extends in (("night-1", ""), ("night-2", "night-1")):
        nights.add(int(name[-1]), SPEAKERS)
        nights.select(name, extends)
        nights.extract(name)
        nights.label(name, extends)
    place = nights.store, nights.run_uri("night-2"), nights.corpus_uri
    seen = trace(*place, "bert-02-1", READS)
    assert [step.outcome for step in seen.steps] == ["read", "selected", *["written"] * 3]
    kept = {step.object for step in seen.steps}
    others = [
        output.uri(nights.run_uri("night-2"))
        for step in FILES
        for output in read_manifest(*place[:2], f"{step}/{SUBSET}").outputs
        if output.key not in kept
    ]
    assert len(others) >= 3 * 5
    for uri in others:
        nights.store.delete(uri)
    assert trace(*place, "bert-02-1", READS) == seen
