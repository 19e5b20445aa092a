"""The data pipeline's steps on a small corpus: counts balance, bytes repeat, nothing is lost."""

from pathlib import Path

import numpy as np
import pytest

from infra.store.object_store import ObjectStore
from pipeline.kbest import KBest
from pipeline.runs.manifest import read_manifest
from pipeline.runs.names import PARTITIONS_STEP
from pipeline.settings import Offsets, TargetsConfig
from pipeline.shards import KBestAtAllOffsets
from pipeline.splicing import splice
from pipeline.steps.targets import generate_targets
from tests import small_run
from tests.four_steps import four_steps, label, manifests, put_teacher, rows_of
from tests.in_process_teacher import teacher_of
from tests.small_corpus import local_store, serially, write_versions


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[ObjectStore, str]:
    """A whole run."""
    return small_run.make_run(tmp_path_factory.mktemp("run"))


def test_partition_targets_belong_to_their_features(run: tuple[ObjectStore, str]) -> None:
    """Each row's k best are the teacher's for just that row's features at the stored offset."""
    for row in rows_of(*run, "partitions"):
        assert isinstance(row.targets, KBest)
        expected = label(splice(row.features, row.offset).astype(np.float32))
        np.testing.assert_array_equal(row.targets.senones, expected.senones)
        np.testing.assert_array_equal(row.targets.logits, expected.logits)


def test_the_same_seed_gives_byte_identical_manifests(
    run: tuple[ObjectStore, str], tmp_path: Path
) -> None:
    """Two runs at different places end in the same bytes, manifest by manifest."""
    assert manifests(*run) == manifests(*small_run.make_run(tmp_path))


VERSIONS = ("ann-DP3", "ann-DP1", "ann-clean", "bob-DP5")


@pytest.mark.parametrize("offsets", ["one", "all"])
def test_a_teacher_may_hear_the_clearest_version(tmp_path: Path, offsets: Offsets) -> None:
    """A version has the targets of the clearest one of its length and speaker, at its own frames.

    The version of another length, and utterances of one version, are heard as they are. What
    several versions hear at one offset is labelled once.
    """
    store, run_uri, corpus_uri = local_store(tmp_path)
    write_versions(store, corpus_uri, {**dict.fromkeys(VERSIONS, 0.6), "bob-DP2": 0.7})
    steps = four_steps(store, run_uri, corpus_uri)
    steps["selection"]()
    steps["features"]()
    put_teacher(store, run_uri)
    config = TargetsConfig(4, 100, 3, offsets, "clearest")
    asked: list[int] = []

    def counting(frames: np.ndarray) -> KBest:
        asked.append(len(frames))
        return label(frames)

    manifest = generate_targets(store, run_uri, config, teacher_of(counting), serially).manifest
    features = {row.utterance_id: row.features for row in rows_of(store, run_uri, "features")}
    heard = dict.fromkeys(("ann-DP3", "ann-DP1"), "ann-clean")
    assert manifest.statistics["num_heard_elsewhere"] == len(heard)
    rows = rows_of(store, run_uri, "targets")
    assert {row.utterance_id for row in rows} == features.keys()
    labelled = set()
    for row in rows:
        name = heard.get(row.utterance_id, row.utterance_id)
        at_all = isinstance(row.kbest, KBestAtAllOffsets)
        for offset in range(3) if at_all else [row.offset]:
            labelled.add((name, offset))
            found = row.kbest.at(offset) if isinstance(row.kbest, KBestAtAllOffsets) else row.kbest
            expected = label(splice(features[name], offset).astype(np.float32))
            np.testing.assert_array_equal(found.senones, expected.senones)
            np.testing.assert_array_equal(found.logits, expected.logits.astype(np.float16))
    assert len(asked) == len(labelled)


def test_the_largest_seed_passes_through_all_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2^64 - 1 samples, shuffles and offsets as any other seed."""
    seed = 2**64 - 1
    monkeypatch.setattr(small_run, "SEED", seed)
    assert read_manifest(*small_run.make_run(tmp_path), PARTITIONS_STEP).config["seed"] == seed
