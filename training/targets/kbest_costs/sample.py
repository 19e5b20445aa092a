"""Measure what the targets' k costs, on a sample of the run's own unlabelled features.

The teacher's and the student's logits are computed here, utterance by utterance.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import nsmallest
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32

from infra.store.object_store import ObjectStore
from pipeline.kbest import TeacherFailure
from pipeline.placement_versions import Versions, heard_versions
from pipeline.records import WITHOUT_PLACEMENT, Tally
from pipeline.runs.commit import Repetition, StepContext
from pipeline.runs.manifest import Output, read_manifest, read_output
from pipeline.runs.names import KBEST_COSTS_STEP, STUDENT, UNLABELLED, features_step, model_step
from pipeline.runs.step import StepContents, StepResult, StepSpec, run_step
from pipeline.sampling import sampling_priority
from pipeline.shards import FeatureRow, read_features
from pipeline.splicing import STACK, num_low_rate_frames
from pipeline.steps.targets import (
    FEATURES,
    Frames,
    FramesAt,
    Hearing,
    TargetsConfig,
    spliced_frames,
    tail_seed,
)
from training.configuration.models import ModelConfig
from training.configuration.targets import (
    LabellingTeacher,
    TrainedTeacherConfig,
    kbest_costs_settings,
)
from training.models.ensemble import Member, ensemble_logits
from training.models.store import load_model, load_models
from training.targets.kbest_costs.costs import KS, CostSums, kbest_costs

TRAINED = TrainedTeacherConfig()

NUM_FRAMES = 20_000
"""The low-rate frames of the sample, in all placements together: ten minutes of speech."""

MAX_SHARDS = 8
MAX_UTTERANCES = 50
"""The utterances of a placement, so that a memory holds them, whatever their number."""

PIECE_FRAMES = 500
"""The frames whose distributions are in memory at a time: 13 MB each at 3,183 senones."""


@dataclass(frozen=True, slots=True)
class SampledUtterance:
    """SampledUtterance: an utterance as the student hears it, and as the teacher does."""

    row: FeatureRow
    heard: FeatureRow

    @property
    def placement(self) -> str:
        """Name the placement as evaluations do."""
        return self.row.placement or WITHOUT_PLACEMENT


@dataclass(frozen=True, slots=True)
class CostedTeachers:
    """CostedTeachers: the teachers that labelled; `load` puts them onto a device.

    They come from the steps `reads`, and hear what `hearing` reads. Any error of the user's own is
    of the utterance, as in their servers.
    """

    load: Callable[[torch.device], Sequence[Member]]
    reads: Sequence[str]
    hearing: Hearing = FEATURES
    config: LabellingTeacher = TRAINED

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """Return the types of the errors that leave out an utterance."""
        return (Exception,) if self.config.members else ()


def trained_teachers(
    store: ObjectStore, run_uri: str, forms: Mapping[str, ModelConfig]
) -> CostedTeachers:
    """Return the run's own models, of which the mean posteriors label."""

    def load(device: torch.device) -> Sequence[Member]:
        models = load_models(store, run_uri, forms, device)
        return [each.model.utterance_logits for each in models.values()]

    return CostedTeachers(load, [model_step(name) for name in forms])


def measure_kbest_costs(
    store: ObjectStore,
    run_uri: str,
    config: TargetsConfig,
    teachers: CostedTeachers,
    student: ModelConfig,
    device: torch.device,
) -> StepResult:
    """Compare the targets' forms at each k, by placement and in all.

    What the teachers cannot hear or fail at has no targets: it is counted, and left out.
    """
    features = features_step(UNLABELLED)

    def measure(_: StepContext) -> StepContents:
        members = teachers.load(device)
        model = load_model(store, run_uri, STUDENT, student).to(device).model
        shards = read_manifest(store, run_uri, features).outputs
        sample = sample_utterances(store, run_uri, shards, config)
        whole = CostSums()
        by_placement: dict[str, CostSums] = defaultdict(CostSums)
        failures: Counter[str] = Counter()
        heard = teachers.hearing.listen([each.heard for each in sample])
        for each, frames in zip(sample, heard, strict=True):
            offset = sampling_priority(config.seed, each.row.utterance_id) % STACK
            seed = tail_seed(config.seed, each.row.utterance_id, offset)
            labels = _labels(members, frames, offset, device, teachers.failures)
            if isinstance(labels, TeacherFailure):
                failures[each.placement] += 1
                continue
            own = _logits([model.utterance_logits], spliced_frames(each.row, offset), device)
            add_costs([whole, by_placement[each.placement]], labels, own, config.k, seed)
        # Tallies are of utterances that a step keeps: this one keeps none.
        found = statistics(whole, by_placement)
        lost = {"without_teacher": dict(sorted(failures.items()))} if failures else {}
        return StepContents.of_all(Tally(), statistics={**found, **lost})

    reads = [features, *teachers.reads, model_step(STUDENT)]
    settings = kbest_costs_settings(config, teachers.config)
    place = store, run_uri, KBEST_COSTS_STEP, settings, reads
    engines = tuple(teachers.hearing.engines)
    return run_step(
        StepSpec(*place, repetition=Repetition.OTHER_LAST_BITS, engines=engines), measure
    )


def _labels(
    members: Sequence[Member],
    heard: FramesAt | TeacherFailure,
    offset: int,
    device: torch.device,
    failures: tuple[type[Exception], ...],
) -> Float32[np.ndarray, "_frames senones"] | TeacherFailure:
    if isinstance(heard, TeacherFailure):
        return heard
    try:
        logits = _logits(members, heard(offset), device)
    except failures as error:
        return TeacherFailure(f"{type(error).__name__}: {error}")
    return logits if np.isfinite(logits).all() else TeacherFailure("logits are not finite")


def statistics(whole: CostSums, by_placement: Mapping[str, CostSums]) -> dict[str, Any]:
    """Return the means in all, and by placement in the order of their names; {} of no frame."""
    if not whole.num_frames:
        return {}
    named = {name: each.means() for name, each in sorted(by_placement.items()) if each.num_frames}
    return {"all": whole.means(), "by_placement": named}


def sample_utterances(
    store: ObjectStore, run_uri: str, shards: Sequence[Output], config: TargetsConfig
) -> list[SampledUtterance]:
    """Draw utterances of each placement by a hash of their ids, from a few shards.

    One shard is in memory at a time. Each placement has about an equal share of NUM_FRAMES.
    """
    chosen = nsmallest(MAX_SHARDS, shards, key=lambda each: sampling_priority(0, each.key))
    best: dict[str, list[SampledUtterance]] = defaultdict(list)
    for shard in chosen:
        found = _read(store, run_uri, shard, config.versions)
        for placement, rows in _by_placement([*found, *_all(best.values())]).items():
            kept = nsmallest(MAX_UTTERANCES, rows, key=partial(_priority, config.seed))
            best[placement] = [_own(each) for each in kept]
    share = NUM_FRAMES // max(len(best), 1)
    return [each for _, rows in sorted(best.items()) for each in _within(rows, share)]


def _read(
    store: ObjectStore, run_uri: str, shard: Output, versions: Versions
) -> list[SampledUtterance]:
    rows = read_features(read_output(store, run_uri, shard))
    return list(map(SampledUtterance, rows, heard_versions(rows, versions)))


def _all(parts: Iterable[Sequence[SampledUtterance]]) -> Iterator[SampledUtterance]:
    for part in parts:
        yield from part


def _by_placement(rows: Sequence[SampledUtterance]) -> dict[str, list[SampledUtterance]]:
    found: dict[str, list[SampledUtterance]] = defaultdict(list)
    for each in rows:
        found[each.placement].append(each)
    return found


def _priority(seed: int, each: SampledUtterance) -> int:
    return sampling_priority(seed, f"costs {each.row.utterance_id}")


def _own(each: SampledUtterance) -> SampledUtterance:
    """Copy the features, which are views of a whole shard."""
    return SampledUtterance(
        *(replace(r, features=r.features.copy()) for r in (each.row, each.heard))
    )


def _within(rows: Sequence[SampledUtterance], num_frames: int) -> list[SampledUtterance]:
    """Keep the first rows up to so many low-rate frames, and at least one."""
    counts = [num_low_rate_frames(len(each.row.features), 0) for each in rows]
    ends = np.cumsum(counts)
    return list(rows[: max(1, int((ends <= num_frames).sum()))])


def _logits(
    members: Sequence[Member], frames: Frames, device: torch.device
) -> Float32[np.ndarray, "_frames senones"]:
    with torch.no_grad():
        (found,) = ensemble_logits(members, [torch.from_numpy(frames).to(device)])
    return found.float().cpu().numpy()


def add_costs(
    sums: Sequence[CostSums],
    teacher: Float32[np.ndarray, "frames senones"],
    student: Float32[np.ndarray, "frames senones"],
    own_k: int,
    seed: int,
) -> None:
    """Add an utterance's costs at each k below the number of senones, piece by piece."""
    ks = [k for k in sorted({*KS, own_k}) if k < teacher.shape[1]]
    for first in range(0, len(teacher), PIECE_FRAMES):
        part = slice(first, first + PIECE_FRAMES)
        costs = {
            k: kbest_costs(teacher[part], student[part], k, (seed + first) % 2**64) for k in ks
        }
        for each in sums:
            each.add(costs)
