"""Certify runs: the order that training reads, segment by segment, beside uniform orders."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from infra.store.object_store import ObjectStore
from jobs.certify import format_certificate
from pipeline.kbest import KBest
from pipeline.records import parse_utterance
from pipeline.runs.manifest import manifest_uri, read_manifest, read_output
from pipeline.settings import RepartitionConfig
from pipeline.shards import read_partition
from pipeline.steps.repartition import repartition
from tests.small_corpus import local_store, serially
from tests.written_run import write_run
from training import certificate
from training import certificate as certificate_module
from training.certificate import (
    CertificateConfig,
    ProvenanceReader,
    certificate_uri,
    certify_dataset,
    certify_run,
    rank_steps,
    read_provenance,
    sub_epoch_steps,
)
from training.data import row_order
from training.data.dataset import Dataset
from training.data.partition_dataset import PartitionDataset, ReadingSettings
from training.data.sub_epochs import SubEpoch
from training.distributed import process_group
from training.fit.model_specs import Fit, student_fit
from training.settings.recipe import read_recipe

RECIPE = Path(__file__).parents[2] / "jobs" / "recipes" / "demo.toml"


def small_fit(*overrides: str) -> Fit:
    return student_fit(read_recipe(str(RECIPE), ["student.minibatch_frames=128", *overrides]))


def remove_certificate(run_uri: str) -> None:
    Path(manifest_uri(run_uri, "certificate")).unlink(missing_ok=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[ObjectStore, str]:
    """Twelve files of 3 speakers and 48 utterances, repartitioned from groups of 4."""
    store, run_uri, _ = local_store(tmp_path_factory.mktemp("certificate"))
    write_run(store, run_uri, num_files=12, num_speakers=3, num_each=16, seed=2)
    repartition(store, run_uri, RepartitionConfig(5 / 3600, 4, 5), serially)
    return store, run_uri


def test_an_augmented_reading_order_is_certified(run: tuple[ObjectStore, str]) -> None:
    """At half the speed a sub-epoch has more minibatches, which the certificate counts."""
    store, run_uri = run
    config = CertificateConfig(num_ranks=2, num_steps=1000, num_sub_epochs=1)
    num_steps = []
    for speed in ("1.0", "0.5"):
        remove_certificate(run_uri)
        what = small_fit(f"student.augmentation.speed=[{speed}]")
        statistics = certify_run(what, store, run_uri, config).manifest.statistics
        num_steps.append(statistics["whole_utterances"]["num_steps"])
    remove_certificate(run_uri)
    assert num_steps[1] > 1.4 * num_steps[0]


def test_provenance_is_that_of_the_selection_files(run: tuple[ObjectStore, str]) -> None:
    """Each row has its file, speaker, position before any shuffle, and the teacher's log Z."""
    store, run_uri = run
    reader = ProvenanceReader(store, run_uri, read_provenance(store, run_uri))
    selection = read_manifest(store, run_uri, "selection/unlabelled").outputs
    lines = {
        parse_utterance(line).utterance_id: number
        for number, output in enumerate(selection)
        for line in read_output(store, run_uri, output).decode().splitlines()
    }
    positions: dict[str, int] = {}
    speakers = set()
    for output in read_manifest(store, run_uri, "partitions/unlabelled").outputs:
        found = reader.read(output)
        rows = read_partition(read_output(store, run_uri, output))
        assert found["file"].tolist() == [lines[row.utterance_id] for row in rows]
        kbests = [row.targets for row in rows if isinstance(row.targets, KBest)]
        means = [kbest.log_z.astype(np.float64).mean() for kbest in kbests]
        np.testing.assert_allclose(found["mean_log_z"], means)
        names = [row.utterance_id for row in rows]
        positions |= dict(zip(names, found["position"].tolist(), strict=True))
        speakers |= set(zip([row.speaker_id for row in rows], found["speaker"], strict=True))
    assert len(speakers) == len({name for name, _ in speakers}) == 36

    # The names of written_run's utterances number files within buckets, speakers and utterances.
    def source_order(name: str) -> tuple[int, str]:
        return int(name.split("-")[1]) % 3, name

    in_order = sorted(positions, key=lambda name: positions[name])
    assert in_order == sorted(positions, key=source_order)


def test_the_certificate_of_a_run(run: tuple[ObjectStore, str]) -> None:
    """Both forms of sub-epoch have figures within their bounds; a second call does nothing."""
    store, run_uri = run
    remove_certificate(run_uri)
    config = CertificateConfig(num_ranks=2, num_steps=8, num_sub_epochs=3)
    result = certify_run(small_fit(), store, run_uri, config)
    assert not result.was_finished
    document = json.loads(store.get(certificate_uri(run_uri)))
    assert (
        document
        == result.manifest.statistics
        == certify_run(small_fit(), store, run_uri, config).manifest.statistics
    )
    store.put(certificate_uri(run_uri), b"damaged")
    assert certify_run(small_fit(), store, run_uri, config).was_finished
    assert json.loads(store.get(certificate_uri(run_uri))) == document
    assert document["uniform_run"]["effective_files"] == pytest.approx(12, rel=0.05)
    assert document["uniform_run"]["effective_speakers"] == pytest.approx(36, rel=0.1)
    assert document["chunks"]["sub_epochs"] == [0, 2, 4]
    assert document["whole_utterances"]["sub_epochs"] == [50, 52, 54]
    for form in ("chunks", "whole_utterances"):
        part = document[form]
        assert part["num_steps"] <= 24
        assert part["num_source_files"] == 12
        for figure in part["step"].values():
            assert (
                None in figure.values()
                or figure["uniform_low"] <= figure["uniform"] <= figure["uniform_high"]
            )
        assert part["step"]["effective_files"]["measured"] > 4
        assert 0.5 < part["step"]["mean_displacement"]["measured"] < 1.5
        assert set(part["step"]) - set(part["rank"]) == {"mean_displacement", "median_displacement"}
    table = format_certificate(document)
    assert "2 ranks" in table
    assert "effective files" in table
    assert "whole utterances" in table


def test_a_certificate_of_other_settings_replaces_none(
    run: tuple[ObjectStore, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two calls at the same time the last one to end fails, and stores nothing."""
    store, run_uri = run
    remove_certificate(run_uri)
    slow, quick = (CertificateConfig(2, num_steps, 3) for num_steps in (8, 9))

    def overtaken(*_: object) -> dict[str, int]:
        monkeypatch.setattr(certificate_module, "certificate", lambda *_: {"number": 9})
        certify_run(small_fit(), store, run_uri, quick)
        return {"number": 8}

    monkeypatch.setattr(certificate_module, "certificate", overtaken)
    with pytest.raises(ValueError, match=r"another recipe.*: num_steps: 9 -> 8: use"):
        certify_run(small_fit(), store, run_uri, slow)
    assert json.loads(store.get(certificate_uri(run_uri)))["number"] == 9
    remove_certificate(run_uri)


def test_a_certificate_is_the_same_for_a_seed(run: tuple[ObjectStore, str]) -> None:
    """The same seed gives a byte-identical manifest; another number of ranks is refused."""
    store, run_uri = run
    config = CertificateConfig(1, 6, 2)
    written = []
    for _ in range(2):
        remove_certificate(run_uri)
        certificate.read_selection_file.cache_clear()
        certify_run(small_fit(), store, run_uri, config)
        written.append(store.get(manifest_uri(run_uri, "certificate")))
    assert written[0] == written[1]
    with pytest.raises(ValueError, match="another recipe"):
        certify_run(small_fit(), store, run_uri, replace(config, num_ranks=2))


def test_one_shard_a_group_gives_one_file_a_rank(tmp_path: Path) -> None:
    """With the paper's G = 1 and a shuffle buffer of one partition, minibatches have one file."""
    store, run_uri, _ = local_store(tmp_path)
    write_run(store, run_uri, num_files=6, num_speakers=3, num_each=32, seed=2)
    repartition(store, run_uri, RepartitionConfig(100 / 3600, 1, 5), serially)
    fit = small_fit("student.num_sub_epochs=1", "student.num_passes=6")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.data.row_order.BUFFER_FRAMES", 1)
        document = certify_run(
            fit, store, run_uri, CertificateConfig(1, 200, 1)
        ).manifest.statistics
    figure = document["chunks"]["rank"]["effective_files"]
    assert figure["measured"] == 1
    assert figure["uniform"] == pytest.approx(6, rel=0.1)


def test_partitions_of_other_sources_are_refused(tmp_path: Path) -> None:
    """An utterance that is in none of its group's files raises an error."""
    store, run_uri, _ = local_store(tmp_path)
    write_run(store, run_uri, num_files=4, num_speakers=1, num_each=4, seed=2)
    outputs = repartition(store, run_uri, RepartitionConfig(1.0, 2, 5), serially).manifest.outputs
    sources = replace(read_provenance(store, run_uri), num_source_shards=1)
    with pytest.raises(ValueError, match="is in none of its 1 source files"):
        ProvenanceReader(store, run_uri, sources).read(outputs[0])


def test_a_torch_dataset_has_a_verdict(run: tuple[ObjectStore, str]) -> None:
    """The shuffled partitions pass; the same rows in the order of their files do not."""
    store, run_uri = run
    with process_group.open_world() as group:
        dataset = PartitionDataset(run_uri, group, ReadingSettings(minibatch_frames=128))
        found = certify_dataset(dataset, num_steps=32)
        assert found.is_uniform, found.verdict
        assert found.verdict == "The order is as mixed as uniform orders of the same rows."
        assert found.figures["chunks"]["num_source_files"] == 12
        files = read_manifest(store, run_uri, "partitions/unlabelled").outputs
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(row_order, "BUFFER_FRAMES", 1)  # a partition at a time: no mixing
            mixed_less = certify_dataset(dataset, num_steps=1000)
        assert len(files) > 1
    assert not mixed_less.is_uniform
    assert "less mixed than uniform orders: chunks step effective_files" in mixed_less.verdict


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Write six files of 12 utterances in about 9 partitions."""
    store, run_uri, _ = local_store(tmp_path_factory.mktemp("dataset"))
    write_run(store, run_uri, num_files=6, num_speakers=3, num_each=4, seed=2)
    config = RepartitionConfig(2 / 3600, 2, 5)
    outputs = repartition(store, run_uri, config, serially).manifest.outputs
    return Dataset(store, run_uri, (), outputs, 3, 64, 5, 0, 2)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])  # whole partitions, and rows of each
@pytest.mark.parametrize("buffer_frames", [40, 240_000])
def test_the_order_is_the_one_that_the_trainer_reads(
    dataset: Dataset,
    monkeypatch: pytest.MonkeyPatch,
    whole: bool,
    world_size: int,
    buffer_frames: int,
) -> None:
    """The features of each segment's partition, row and start are the minibatch's."""
    monkeypatch.setattr(row_order, "BUFFER_FRAMES", buffer_frames)
    sub_epoch = SubEpoch(False, 1, 2, 0, whole, 0.1)
    partitions = {
        output.key: read_partition(read_output(dataset.store, dataset.run_uri, output))
        for output in dataset.unlabelled
    }
    for rank in range(world_size):
        ranks = replace(dataset, rank=rank, world_size=world_size)
        located = list(rank_steps(ranks, sub_epoch, 3))
        minibatches = list(ranks.plan(sub_epoch, 3).minibatches())
        assert len(located) == len(minibatches)
        for found, minibatch in zip(located, minibatches, strict=True):
            rows = [
                partitions[output.key][row]
                for output, row in zip(found.partitions, found.rows, strict=True)
            ]
            # All frames of an utterance are its level in this corpus.
            levels = torch.tensor([float(row.features[0, 0]) for row in rows])
            torch.testing.assert_close(minibatch.features[:, 0, 0], levels)
            ends = [len(row.features) // 3 + 3 for row in rows]
            left = [end - start for end, start in zip(ends, found.starts, strict=True)]
            expected = left if whole else [min(frames, 32) for frames in left]
            assert minibatch.lengths.tolist() == expected


def test_all_steps_of_all_ranks_read_each_utterance_once(dataset: Dataset) -> None:
    """All steps read each utterance once; a rank without data is missing from a step."""
    dataset = replace(dataset, world_size=3)
    steps = list(sub_epoch_steps(dataset, SubEpoch(False, 0, 1, 0, True, 0.1), 0))
    read = Counter(
        (output.key, row)
        for step in steps
        for minibatch in step
        for output, row in zip(minibatch.partitions, minibatch.rows.tolist(), strict=True)
    )
    assert set(read.values()) == {1}
    assert len(read) == 6 * 12
    plans = (
        replace(dataset, rank=rank).plan(SubEpoch(False, 0, 1, 0, True, 0.1), 0)
        for rank in range(3)
    )
    counts = [plan.num_minibatches() for plan in plans]
    assert [len(step) for step in steps] == [
        sum(count > number for count in counts) for number in range(max(counts))
    ]
