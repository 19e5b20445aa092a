"""Count by placement what a model trains on, and what it leaves out, before training begins."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from infra.prefetch import prefetch
from infra.settings import ConfigurationError, printable
from infra.store.object_store import scan_checked
from pipeline.records import WITHOUT_PLACEMENT, Tally
from pipeline.runs.manifest import Output
from pipeline.shards import read_partition_index
from training.data.dataset import Dataset
from training.distributed.collectives import gather_text
from training.distributed.process_group import ProcessGroup
from training.fit.model_specs import Fit

Tallies = Mapping[str, Tally]
"""Utterances and their duration, by placement."""

INDEXES_IN_FLIGHT = 16
MAX_NAMES = 500
"""Characters of the known placements in a message."""


@dataclass(frozen=True, slots=True)
class TrainedData:
    """TrainedData: what a model trains on, and by placement what it leaves out."""

    trained: Tally
    left_out_at: Tallies = field(default_factory=dict)

    @property
    def left_out(self) -> Tally:
        """Add up what is left out."""
        return sum(self.left_out_at.values(), Tally())

    @property
    def statistics(self) -> dict[str, Any]:
        """Return the manifest's statistics; none where nothing is left out."""
        found = {name: asdict(tally) for name, tally in sorted(self.left_out_at.items())}
        return {"left_out": found} if found else {}


def trained_data(
    fit: Fit, dataset: Dataset, every: Tally, group: ProcessGroup, device: torch.device
) -> TrainedData:
    """Divide the utterances, `every` in all, by the fit's placements; all ranks call it together.

    Raises ConfigurationError on all of them for a placement that no utterance has, and where no
    labelled or no unlabelled utterance is left.
    """
    placements = fit.augmentation.placements
    if not placements:
        return TrainedData(every)
    read = {fit.labelled: dataset.labelled}
    if fit.unlabelled is not None:
        read[fit.unlabelled] = dataset.unlabelled
    by_step = {
        step: placement_tallies(dataset, outputs, group, device) for step, outputs in read.items()
    }
    require_placements(fit, by_step)
    found: dict[str, Tally] = {}
    for tallies in by_step.values():
        for name, tally in tallies.items():
            found[name] = found.get(name, Tally()) + tally
    trained = sum((tally for name, tally in found.items() if name in placements), Tally())
    left_out = {name: tally for name, tally in found.items() if name not in placements}
    assert trained + sum(left_out.values(), Tally()) == every, "manifests count their rows"
    return TrainedData(trained, left_out)


def require_placements(fit: Fit, by_step: Mapping[str, Tallies]) -> None:
    """Raise ConfigurationError if a step has no utterance at the fit's placements, or none has one.

    The message names the placements that are known.
    """
    known = sorted(set().union(*by_step.values()))
    where = f"{fit.name}: augmentation.placements"
    if unknown := [name for name in fit.augmentation.placements if name not in known]:
        raise ConfigurationError(
            f"{where} = {printable(unknown[0])}: no utterance is there: {_remedy(known)}"
        )
    for step, tallies in by_step.items():
        if not tallies.keys() & set(fit.augmentation.placements):
            names = printable(", ".join(fit.augmentation.placements), MAX_NAMES)
            remedy = _remedy(sorted(tallies))
            raise ConfigurationError(f"{where} = {names}: leaves nothing of {step}: {remedy}")


def _remedy(known: Sequence[str]) -> str:
    if set(known) <= {WITHOUT_PLACEMENT}:
        return (
            "the partitions name no placement: need placements = [], or ingest with --placements, "
            "or by this version, into a new --run"
        )
    return f"need some of {printable(', '.join(known), MAX_NAMES)}"


def placement_tallies(
    dataset: Dataset, outputs: Sequence[Output], group: ProcessGroup, device: torch.device
) -> Tallies:
    """Count the utterances of partitions by placement; ranks share the reading, and know all.

    With lattices only utterances that have one are counted.
    """
    numbers: Counter[str] = Counter()
    durations: Counter[str] = Counter()
    own = outputs[group.rank() :: group.size()]
    for _, placed in prefetch(partial(_placed, dataset), own, INDEXES_IN_FLIGHT):
        for name, duration_ms in placed:
            numbers[name] += 1
            durations[name] += duration_ms
    counted = json.dumps({name: [numbers[name], durations[name]] for name in sorted(numbers)})
    found: dict[str, Tally] = {}
    for text in gather_text(counted, group, "placements", device):
        for name, counts in json.loads(text).items():
            found[name] = found.get(name, Tally()) + Tally(*counts)
    return found


def _placed(dataset: Dataset, output: Output) -> list[tuple[str, int]]:
    """Read the placement and the duration of each utterance that could be trained on."""
    uri = output.uri(dataset.run_uri)
    index = scan_checked(dataset.store, uri, read_partition_index)
    names = [each or WITHOUT_PLACEMENT for each in index.placements]
    rows = list(zip(names, index.durations_ms, strict=True))
    if dataset.lattices is None:
        return rows
    return [rows[number] for number in dataset.lattices.decoded_rows(output).tolist()]
