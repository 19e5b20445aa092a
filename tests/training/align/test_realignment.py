"""Realignment as tasks, in rounds; versions of an utterance that share the clearest alignment."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra.store.object_store import join_uri
from pipeline.audit.verify import verify_run
from pipeline.records import version_id
from pipeline.runs.commit import committed_tasks, step_context
from pipeline.runs.manifest import Manifest, manifest_uri, read_manifest, read_output
from pipeline.runs.names import (
    ALIGNER,
    ALIGNMENT_STEP,
    BOOTSTRAP_STEP,
    DEV,
    alignment_steps,
    realignment_rounds,
)
from pipeline.shards import Alignment, FeatureRow, PartitionRow, read_features, read_partition
from tests.small_corpus import serially
from tests.training.align.labelled_run import (
    FEATURES,
    NETWORK,
    NUM_SHARDS,
    Place,
    bootstrapped,
    shards,
    store_network,
    write_features_of,
    write_labelled,
)
from training.align.labelled import read_tree
from training.align.realignment import AlignmentSettings, StoredNetwork, realign
from training.align.shard_alignment import senones_of
from training.settings.decoding import TreeConfig

SETTINGS = AlignmentSettings(0.3, NETWORK)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = write_labelled(tmp_path, shards())
    bootstrapped(made, max_hours=8 / 3600)
    return made


class KilledError(Exception):
    """KilledError ends the driver in the middle of a step."""


def test_a_killed_realignment_resumes_shard_by_shard(place: Place) -> None:
    """Shards that a killed step has committed are not aligned again; the manifest is the same."""
    store, run_uri, _ = place
    (only,) = realignment_rounds(1)
    store_network(place, only.aligner)
    ran: list[str] = []

    def one_then_killed(tasks: Sequence[Any], function: Any, description: str) -> list[Any]:
        ran.append(function.run_task(tasks[0]).task)
        raise KilledError(description)

    def counted(tasks: Sequence[Any], function: Any, description: str) -> list[Any]:
        del description
        results = [function(task) for task in tasks]
        ran.extend(result.task for result in results)
        return results

    for _ in range(2):
        with pytest.raises(KilledError):
            realign(*place, only, SETTINGS, 0.0, one_then_killed)
    resumed = realign(*place, only, SETTINGS, 0.0, counted).manifest
    assert sorted(ran) == ["000000", "000001", "000002"]
    labelled = read_manifest(store, run_uri, FEATURES).tally_out
    assert resumed.tally_in == resumed.tally_out == labelled
    for uri in [each.uri for each in store.list(join_uri(run_uri, ALIGNMENT_STEP))]:
        store.delete(uri)
    assert realign(*place, only, SETTINGS, 0.0, serially).manifest.to_bytes() == resumed.to_bytes()
    assert realign(*place, only, SETTINGS, 0.0, serially).was_finished


def test_the_first_of_two_attempts_is_taken(place: Place) -> None:
    """A speculative attempt on another processor, with other last bits, fails no step."""
    store, run_uri, _ = place
    (only,) = realignment_rounds(1)
    store_network(place, only.aligner)
    tasks: list[Any] = []

    def twice(pending: Sequence[Any], function: Any, description: str) -> list[Any]:
        del description
        tasks.extend(pending)
        return [function(task) for task in pending]

    manifest = realign(*place, only, SETTINGS, 0.0, twice).manifest
    context = tasks[0].context
    first = context.committed("000000")
    output = context.put_output("000000", ".parquet", b"other last bits", first.outputs[0].tally)
    late = type(first)(
        **{name: getattr(first, name) for name in first.__slots__} | {"outputs": (output,)}
    )
    assert context.commit(late) == first
    assert len(manifest.outputs) == NUM_SHARDS
    config, inputs = manifest.config, manifest.inputs
    again = step_context(store, run_uri, ALIGNMENT_STEP, config, inputs)
    assert committed_tasks(again).keys() == {"000000", "000001", "000002"}


def test_rounds_follow_each_other(place: Place) -> None:
    """The first network learns from the bootstrap, each later one from the round before it.

    The last round has the names that later steps read, and verify finds all utterances.
    """
    store, run_uri, corpus_uri = place
    rounds = realignment_rounds(3)
    assert [each.aligner for each in rounds] == ["aligner_1", "aligner_2", ALIGNER]
    reads = [BOOTSTRAP_STEP, "alignments/round_1", "alignments/round_2"]
    assert [each.reads for each in rounds] == reads
    assert [each.writes for each in rounds] == [*reads[1:], ALIGNMENT_STEP]
    for each in rounds:
        store_network(place, each.aligner)
        manifest = realign(*place, each, SETTINGS, 0.0, serially).manifest
        assert manifest.step == each.writes
        assert f"models/{each.aligner}" in manifest.inputs
    written = alignment_steps(3)
    assert written[0] == BOOTSTRAP_STEP
    assert len(written) == 7
    assert all(store.exists(manifest_uri(run_uri, step)) for step in written)
    found = verify_run(store, run_uri, corpus_uri, lambda *_: None)
    assert [each for each in found.findings if "alignments" in each.object] == []


def test_the_tree_is_grown_again_on_the_last_alignment(place: Place) -> None:
    """The frames keep their phones, and all that is read later has the new tree's senones.

    The aligner's tree stays the bootstrap's. Development speakers take the new senones, too.
    """
    store, run_uri, _ = place
    (only,) = realignment_rounds(1)
    store_network(place, only.aligner)
    write_features_of(store, run_uri, DEV, shards()[:1])
    plain = senones(place, realign(*place, only, SETTINGS, 0.0, serially).manifest)
    for uri in [each.uri for each in store.list(join_uri(run_uri, ALIGNMENT_STEP))]:
        store.delete(uri)
    regrown = replace(SETTINGS, regrown=TreeConfig(12, 30))
    manifest = realign(*place, only, regrown, 0.0, serially).manifest
    before, after = read_tree(store, run_uri, BOOTSTRAP_STEP), read_tree(store, run_uri)
    assert after.num_senones == manifest.statistics["num_senones"] == 12 < before.num_senones
    assert manifest.config["senones"]["max_senones"] == 12
    found = senones(place, manifest)
    assert sum(manifest.statistics["senone_counts"]) == sum(map(len, found.values()))
    centres = [
        {senone: c for (_, c, _), senone in np.ndenumerate(tree.table)} for tree in (before, after)
    ]
    for name, labels in plain.items():
        assert [centres[0][each] for each in labels] == [centres[1][each] for each in found[name]]
    of_dev = realign(*place, only, regrown, 0.0, serially, subset=DEV).manifest
    assert of_dev.statistics["senone_tree"] == after.to_json()
    assert senones(place, of_dev) == {name: found[name] for name in senones(place, of_dev)}
    assert ALIGNMENT_STEP in of_dev.inputs


def test_a_tree_of_the_same_alignment_gives_the_same_senones(place: Place) -> None:
    """Relabelled by the bootstrap's own tree, the phones' senones are those that were aligned."""
    store, run_uri, corpus_uri = place
    (only,) = realignment_rounds(1)
    store_network(place, only.aligner)
    plain = senones(place, realign(*place, only, SETTINGS, 0.0, serially).manifest)
    outputs = read_manifest(store, run_uri, FEATURES).outputs
    rows = [row for each in outputs for row in read_features(read_output(store, run_uri, each))]
    context = step_context(store, run_uri, ALIGNMENT_STEP, {}, {})
    network = StoredNetwork(corpus_uri, SETTINGS, only.aligner).load(context)
    found = senones_of(network.align(rows), network.tree)
    assert {name: each.tolist() for name, each in found.items()} == plain


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
    """Return the senones of each utterance; a version's id ends in the placement of its row."""
    store, run_uri, _ = place
    rows = [
        row
        for output in manifest.outputs
        for row in read_partition(read_output(store, run_uri, output))
    ]
    versions = [row for row in rows if row.placement is not None]
    assert all(row.utterance_id == version_id(source_of(row), row.placement) for row in versions)
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
