"""An utterance of an increment is traced by the objects that hold it, as one of any other run."""

from pathlib import Path

import pytest

from pipeline.audit.trace import trace
from pipeline.runs.manifest import read_manifest
from tests.pipeline.runs.small_commits import set_small_bounds
from tests.pipeline.steps.increments import nights as small_nights
from tests.pipeline.steps.increments.nights import SUBSET, Nights

SPEAKERS = ["ann", "bert", "clara", "doris"]
FILES = ("selection", "features", "targets")


@pytest.mark.parametrize("max_listed", [4_000, 2])
def test_only_the_shards_that_hold_it_are_read(
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
    seen = trace(*place, "bert-02-1")
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
    assert trace(*place, "bert-02-1") == seen
