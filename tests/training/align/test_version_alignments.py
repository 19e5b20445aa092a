"""Versions of an utterance share the alignment of the clearest one, if the recipe says so."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from infra.store.object_store import join_uri
from pipeline.records import version_id
from pipeline.runs.manifest import Manifest, read_manifest, read_output
from pipeline.runs.names import BOOTSTRAP_STEP, realignment_rounds
from pipeline.shards import Alignment, FeatureRow, PartitionRow, read_partition
from tests.small_corpus import serially
from tests.training.align.labelled_run import (
    FEATURES,
    NETWORK,
    Place,
    bootstrapped,
    shards,
    store_network,
    write_labelled,
)
from training.align.network_alignment import AlignmentSettings, realign

NOISY, CLEAN = "DP3", "clean"


def version(row: FeatureRow, placement: str) -> FeatureRow:
    """Return the utterance as it sounds in a placement: DP3 is loud noise throughout."""
    frames = row.features
    if placement == NOISY:
        frames = np.random.default_rng(1).normal(size=frames.shape).astype(np.float16)
    name = version_id(row.utterance_id, placement)
    return replace(row, utterance_id=name, placement=placement, features=frames)


def versions_of(rows: list[FeatureRow], *placements: str) -> list[FeatureRow]:
    return [version(row, placement) for row in rows for placement in placements]


def place_of(folder: Path, *placements: str) -> Place:
    return write_labelled(folder, [versions_of(part, *placements) for part in shards()])


def senones(place: Place, manifest: Manifest) -> dict[str, list[int]]:
    """Return the senones of each version by its id, which ends in the placement of its row."""
    store, run_uri, _ = place
    rows = [
        row
        for output in manifest.outputs
        for row in read_partition(read_output(store, run_uri, output))
    ]
    assert all(row.utterance_id == version_id(source_of(row), row.placement) for row in rows)
    return {
        row.utterance_id: row.targets.senones.tolist()
        for row in rows
        if isinstance(row.targets, Alignment)
    }


def source_of(row: PartitionRow) -> str:
    return row.utterance_id.removesuffix(f"-{row.placement}")


def twice(of_clean: dict[str, list[int]]) -> dict[str, list[int]]:
    """Give the noisy versions what the clean ones have."""
    noisy = {name.removesuffix(CLEAN) + NOISY: alignment for name, alignment in of_clean.items()}
    return of_clean | noisy


def test_the_bootstrap_hears_the_clearest_version_alone(tmp_path: Path) -> None:
    """Tree and alignments are those of the clean versions alone, and every version has one."""
    clean, both = place_of(tmp_path / "clean", CLEAN), place_of(tmp_path / "both", NOISY, CLEAN)
    alone, shared = bootstrapped(clean), bootstrapped(both, versions="clearest")
    assert senones(both, shared.manifest) == twice(senones(clean, alone.manifest))
    trees = [each.manifest.statistics["senone_tree"] for each in (alone, shared)]
    assert trees[0] == trees[1]
    assert shared.manifest.tally_out == read_manifest(*both[:2], FEATURES).tally_out


def test_realignment_hears_the_clearest_version_alone(tmp_path: Path) -> None:
    """The network aligns clean versions; each by itself, the noisy ones have other senones."""
    place = place_of(tmp_path, NOISY, CLEAN)
    bootstrapped(place, versions="clearest")
    (only,) = realignment_rounds(1)
    store_network(place, only.aligner)
    own = AlignmentSettings(0.3, NETWORK)
    by_itself = senones(place, realign(*place, only, own, 0.0, serially).manifest)
    of_clean = {name: each for name, each in by_itself.items() if name.endswith(CLEAN)}
    assert by_itself != twice(of_clean)
    store, run_uri, _ = place
    for uri in [each.uri for each in store.list(join_uri(run_uri, only.writes))]:
        store.delete(uri)
    clearest = replace(own, versions="clearest")
    assert senones(place, realign(*place, only, clearest, 0.0, serially).manifest) == twice(
        of_clean
    )


def test_the_version_that_is_heard_is_part_of_a_steps_settings(tmp_path: Path) -> None:
    """A finished step of the other setting is refused."""
    place = place_of(tmp_path, CLEAN)
    assert bootstrapped(place).manifest.config["versions"] == "own"
    with pytest.raises(ValueError, match=BOOTSTRAP_STEP):
        bootstrapped(place, versions="clearest")
