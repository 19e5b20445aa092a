"""The manifest of a finished step: its text, its balance, and reads that check digests.

A long list of outputs is read part by part, and few parts for one place.
"""

import hashlib
import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from infra.store.object_store import ObjectStore, join_uri
from pipeline.records import Tally
from pipeline.runs.manifest import (
    Manifest,
    Output,
    OutputPart,
    OutputsInParts,
    first_own,
    input_digests,
    manifest_uri,
    read_manifest,
    read_output,
    sha256,
    subsets_of_run,
)
from pipeline.runs.names import ALL_SUBSETS, SUBSETS

SHARD = Output("features/x/ab/0-abcd.parquet", 9, "abcd", utterances=2, duration_ms=1_800_000)
LEDGER = Output("features/x/ef/0-ef01.ledger.jsonl", 5, "ef01", utterances=1, duration_ms=500)
MANIFEST = Manifest(
    "features/x",
    {"k": 20},
    {"selection/x": "0123"},
    (SHARD,),
    (LEDGER,),
    tally_in=Tally(6, 1_802_000),
    tally_out=Tally(2, 1_800_000),
    quarantined=Tally(1, 500),
    unselected=Tally(3, 1500),
    statistics={"mean": 0.25},
    code_version="1.2",
)


def test_development_speakers_that_are_not_finished_are_not_left_out(tmp_path: Path) -> None:
    """Without anything below features/dev a run has none; a commit alone is refused by name."""
    store, run_uri = ObjectStore((str(tmp_path),)), str(tmp_path)
    assert subsets_of_run(store, run_uri) == SUBSETS
    store.put(join_uri(run_uri, "features/dev/commits/000000.json"), b"{}")
    with pytest.raises(ValueError, match="finish features/dev first"):
        subsets_of_run(store, run_uri)
    store.put(manifest_uri(run_uri, "features/dev"), MANIFEST.to_bytes())
    assert subsets_of_run(store, run_uri) == ALL_SUBSETS


def test_the_document_is_the_one_that_readers_know() -> None:
    """Every key by its name, hours to six digits, and the SHA-256 of the configuration."""
    document = json.loads(MANIFEST.to_bytes())
    assert document.pop("sha256")
    assert document == {
        "step": "features/x",
        "config": {"k": 20},
        "config_digest": hashlib.sha256(b'{"k": 20}').hexdigest(),
        "inputs": {"selection/x": "0123"},
        "outputs": [
            {
                "key": "features/x/ab/0-abcd.parquet",
                "num_bytes": 9,
                "sha256": "abcd",
                "utterances": 2,
                "duration_ms": 1_800_000,
            }
        ],
        "ledgers": [
            {
                "key": "features/x/ef/0-ef01.ledger.jsonl",
                "num_bytes": 5,
                "sha256": "ef01",
                "utterances": 1,
                "duration_ms": 500,
            }
        ],
        "tally_in": {"utterances": 6, "duration_ms": 1_802_000, "hours": 0.500556},
        "tally_out": {"utterances": 2, "duration_ms": 1_800_000, "hours": 0.5},
        "quarantined": {"utterances": 1, "duration_ms": 500, "hours": 0.000139},
        "unselected": {"utterances": 3, "duration_ms": 1500, "hours": 0.000417},
        "statistics": {"mean": 0.25},
        "code_version": "1.2",
        "versions": {},
        "id_index": [],
        "stream_means": [],
        "extends": None,
    }


@pytest.mark.parametrize("name", ["tally_in", "tally_out", "quarantined", "unselected"])
@pytest.mark.parametrize("more", [Tally(1, 0), Tally(0, 1)])
def test_a_lost_utterance_is_no_manifest(name: str, more: Tally) -> None:
    """In = written + quarantined + unselected, or an error with all four tallies."""
    changed = {name: getattr(MANIFEST, name) + more}
    with pytest.raises(ValueError, match="an utterance was lost: do not use this") as caught:
        replace(MANIFEST, **changed)
    tallies = {each: getattr(MANIFEST, each) for each in ("tally_in", "tally_out")}
    tallies |= {each: getattr(MANIFEST, each) for each in ("quarantined", "unselected")} | changed
    assert str(caught.value).startswith(
        "features/x: {tally_in} in, but {tally_out} written + {quarantined} quarantined + "
        "{unselected} unselected; ".format(**tallies)
    )


def test_a_manifest_has_the_version_of_the_installed_code() -> None:
    """Unless it was read, with the version that wrote it."""
    assert Manifest("features/x", {}, {}, ()).code_version == version("megahour")


def test_a_manifest_lies_below_its_step(tmp_path: Path) -> None:
    """It is read from there, and its digest is that of its bytes."""
    store, run_uri = ObjectStore((str(tmp_path),)), str(tmp_path)
    assert manifest_uri(run_uri, "features/x") == f"{tmp_path}/features/x/manifest.json"
    store.put(manifest_uri(run_uri, "features/x"), MANIFEST.to_bytes())
    assert read_manifest(store, run_uri, "features/x") == MANIFEST
    digest = hashlib.sha256(MANIFEST.to_bytes()).hexdigest()
    assert input_digests(store, run_uri, ["features/x"]) == {"features/x": digest}


def test_an_output_is_read_only_if_it_has_its_digest(tmp_path: Path) -> None:
    """Altered bytes are an error with the URI and both digests."""
    store, data = ObjectStore((str(tmp_path),)), b"rows"
    output = Output("features/x/0.parquet", len(data), sha256(data), 1, 10)
    store.put(f"{tmp_path}/features/x/0.parquet", data)
    assert read_output(store, str(tmp_path), output) == data
    store.put(f"{tmp_path}/features/x/0.parquet", b"rowz")
    digests = f"SHA-256 is {sha256(b'rowz')}, its manifest says {sha256(data)}; the object"
    with pytest.raises(ValueError, match=f"{tmp_path}/features/x/0.parquet: {digests}"):
        read_output(store, str(tmp_path), output)


NUM_PARTS, PART_OUTPUTS = 64, 3


class Parts:
    """Parts keeps the lines of a list in parts, and the keys of the parts that were read."""

    def __init__(self, outputs: list[Output]) -> None:
        self.data = {
            f"part-{first}": b"".join(each.to_line() for each in outputs[first:][:PART_OUTPUTS])
            for first in range(0, len(outputs), PART_OUTPUTS)
        }
        self.read: list[str] = []

    def listed(self) -> OutputsInParts:
        """Return the list."""
        parts = [OutputPart(key, len(each), "", PART_OUTPUTS) for key, each in self.data.items()]
        return OutputsInParts(parts, self._read)

    def _read(self, part: OutputPart) -> bytes:
        self.read.append(part.key)
        return self.data[part.key]


@pytest.mark.parametrize("num_before", [0, 1, 2, 3, 100, 189, 191, 192])
def test_the_first_own_output_is_found_in_few_parts(num_before: int) -> None:
    """A part for each halving of the list, wherever the base's outputs end."""
    num = NUM_PARTS * PART_OUTPUTS
    outputs = [
        Output(f"{place:03d}", 1, "", 0, 0, run="runs/base" if place < num_before else "")
        for place in range(num)
    ]
    parts = Parts(outputs)
    assert first_own(parts.listed()) == first_own(tuple(outputs)) == num_before
    assert len(parts.read) <= num.bit_length()
