"""Measure what storing k logits a frame costs, on a sample of the run's unlabelled data.

Costs are in probability, agreement, calibration and gradients, frame by frame. The bias of
renormalized k-best targets is that of arXiv 2503.16870; 003 V-C keeps k = 20 without a figure. The
teacher's and the student's logits are computed here, utterance by utterance.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from heapq import nsmallest
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int64
from scipy.special import softmax

from infra.store.object_store import ObjectStore
from pipeline.filterbank import STACK
from pipeline.kbest import TeacherFailure, select_kbest, soft_targets
from pipeline.placement_versions import heard_versions
from pipeline.records import WITHOUT_PLACEMENT, Tally
from pipeline.runs.commit import Repetition
from pipeline.runs.engine import StepResult, StepRun, StepSpec, run_step
from pipeline.runs.manifest import Manifest, Output, read_manifest, read_output
from pipeline.runs.names import KBEST_COSTS_STEP, STUDENT, UNLABELLED, features_step, model_step
from pipeline.sampling import sampling_priority
from pipeline.settings import TargetsConfig
from pipeline.shards import FeatureRow, read_features
from pipeline.splicing import num_low_rate_frames
from pipeline.steps.targets import FEATURES, Frames, FrameSource, spliced_frames, tail_seed
from training.models.store import load_model
from training.settings.decoding import LabellingTeacher, TrainedTeacherConfig, kbest_costs_settings
from training.settings.models import ModelConfig
from training.targets.teacher import Member, ensemble_logits

KS = (1, 5, 10, 20, 40)

FrameValues: TypeAlias = Float64[np.ndarray, " frames"]
Distributions: TypeAlias = Float64[np.ndarray, "frames senones"]

CostValues: TypeAlias = FrameValues | Bool[np.ndarray, " frames"]
KBestCosts: TypeAlias = Mapping[str, CostValues]
"""The costs of k columns by name, frame by frame.

`mass` is the teacher's probability of its k best; `agreement` whether the student's best senone is
among them. Forms are "renormalized" to one, "ghost" with one class of all others, and "sampled"
with a fifth of the columns drawn. Of each, `calibration_error_FORM` is the distance from the
teacher's best probability of that which fits the targets; `angle_FORM` is between the gradient by
the student's logits and the full one, p - t, in degrees.
"""


def num_drawn(k: int) -> int:
    """Return how many of k columns are drawn in the sampled form: 4 of 20, none of 1."""
    return min(max(k // 5, 1), k - 1)


def kbest_costs(
    teacher: Float32[np.ndarray, "frames senones"],
    student: Float32[np.ndarray, "frames senones"],
    k: int,
    seed: int,
) -> KBestCosts:
    """Return the costs of k columns, of logits of both; `seed` draws the sampled form's tail."""
    t, p = softmax(teacher.astype(np.float64), axis=1), softmax(student.astype(np.float64), axis=1)
    best = np.argsort(-t, axis=1, kind="stable")[:, :k]
    kept = np.zeros_like(t)
    np.put_along_axis(kept, best, np.take_along_axis(t, best, axis=1), axis=1)
    mass = kept.sum(axis=1)
    targets = {"renormalized": kept / mass[:, np.newaxis], "ghost": _with_ghost(kept, p, best)}
    if num_drawn(k):  # a single column is the best senone, and none is left to draw
        targets["sampled"] = _sampled(teacher, k, seed)
    agrees = (best == p.argmax(axis=1)[:, np.newaxis]).any(axis=1)
    costs: dict[str, CostValues] = {"mass": mass, "agreement": agrees}
    for form, target in targets.items():
        first = np.take_along_axis(target - t, best[:, :1], axis=1)[:, 0]
        costs[f"calibration_error_{form}"] = np.abs(first)
        costs[f"angle_{form}"] = _angles(p - target, p - t)
    return costs


def _with_ghost(
    kept: Distributions, p: Distributions, best: Int64[np.ndarray, "frames k"]
) -> Distributions:
    """Complete the k best by the missing mass, in the student's own shares of the others."""
    others = p.copy()
    np.put_along_axis(others, best, 0, axis=1)
    shares = others / np.maximum(others.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    completed: Distributions = kept + (1 - kept.sum(axis=1, keepdims=True)) * shares
    return completed


def _sampled(teacher: Float32[np.ndarray, "frames senones"], k: int, seed: int) -> Distributions:
    """Return the stored distribution with a drawn tail, over all senones."""
    kbest = select_kbest(teacher, k, num_drawn(k), seed)
    dense = np.zeros(teacher.shape)
    frames = np.arange(len(teacher))[:, np.newaxis]
    np.add.at(dense, (frames, kbest.senones.astype(np.int64)), soft_targets(kbest))
    return dense


def _angles(some: Distributions, full: Distributions) -> FrameValues:
    """Return the angles between vectors in degrees, 0 where either has no length."""
    lengths = np.linalg.norm(some, axis=1) * np.linalg.norm(full, axis=1)
    has_length = lengths > 0
    cosines = np.ones(len(some))
    np.divide((some * full).sum(axis=1), lengths, out=cosines, where=has_length)
    angles: FrameValues = np.degrees(np.arccos(np.clip(cosines, -1, 1)))
    return angles


class CostSums:
    """CostSums adds up frames' costs by k, as one placement's or those of all."""

    def __init__(self) -> None:
        self.num_frames = 0
        self._by_k: defaultdict[int, dict[str, float]] = defaultdict(dict)

    def add(self, by_k: Mapping[int, KBestCosts]) -> None:
        """Add the frames of a piece of an utterance."""
        for k, costs in by_k.items():
            sums = self._by_k[k]
            for name, values in costs.items():
                sums[name] = sums.get(name, 0.0) + float(values.sum())
        self.num_frames += len(next(iter(by_k.values()))["mass"])

    def means(self) -> dict[str, object]:
        """Return the means a frame by k, as JSON holds them."""
        return {
            "num_frames": self.num_frames,
            "k": {
                str(k): {name: value / self.num_frames for name, value in sums.items()}
                for k, sums in self._by_k.items()
            },
        }


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

    They come from the steps `reads`, and hear what `source` reads. Any error of the user's own is
    of the utterance, as in their servers.
    """

    load: Callable[[torch.device], Sequence[Member]]
    reads: Sequence[str]
    source: FrameSource = FEATURES
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
        models = [load_model(store, run_uri, name, form) for name, form in forms.items()]
        return [each.to(device).model.utterance_logits for each in models]

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

    def measure(step: StepRun) -> Manifest:
        members = teachers.load(device)
        model = load_model(store, run_uri, STUDENT, student).to(device).model
        shards = read_manifest(store, run_uri, features).outputs
        sample = sample_utterances(store, run_uri, shards, config)
        whole = CostSums()
        by_placement: dict[str, CostSums] = defaultdict(CostSums)
        failures: Counter[str] = Counter()
        heard = teachers.source.frames_of([each.heard for each in sample])
        for each, frames in zip(sample, heard, strict=True):
            offset = sampling_priority(config.seed, each.row.utterance_id) % STACK
            seed = tail_seed(config.seed, each.row.utterance_id, offset)
            labels = None
            if not isinstance(frames, TeacherFailure):
                with suppress(*teachers.failures):
                    labels = _logits(members, frames(offset), device)
            if labels is None or not np.isfinite(labels).all():
                failures[each.placement] += 1
                continue
            own = _logits([model.utterance_logits], spliced_frames(each.row, offset), device)
            add_costs([whole, by_placement[each.placement]], labels, own, config.k, seed)
        # Tallies are of utterances that a step keeps: this one keeps none.
        found: dict[str, Any] = {}
        if whole.num_frames:
            named = sorted(by_placement.items())
            found["all"] = whole.means()
            found["by_placement"] = {name: each.means() for name, each in named if each.num_frames}
        if failures:
            found["without_teacher"] = dict(sorted(failures.items()))
        return step.lossless(Tally(), statistics=found)

    reads = [features, *teachers.reads, model_step(STUDENT)]
    settings = kbest_costs_settings(config, teachers.config)
    spec = StepSpec(
        store,
        run_uri,
        KBEST_COSTS_STEP,
        settings,
        reads,
        repetition=Repetition.OTHER_LAST_BITS,
        engines=tuple(teachers.source.engines),
    )
    return run_step(spec, measure)


def sample_utterances(
    store: ObjectStore, run_uri: str, shards: Sequence[Output], config: TargetsConfig
) -> list[SampledUtterance]:
    """Draw utterances of each placement by a hash of their ids, from a few shards.

    One shard is in memory at a time. Each placement has about an equal share of NUM_FRAMES.
    """

    def priority(each: SampledUtterance) -> int:
        return sampling_priority(config.seed, f"costs {each.row.utterance_id}")

    chosen = nsmallest(MAX_SHARDS, shards, key=lambda each: sampling_priority(0, each.key))
    best: dict[str, list[SampledUtterance]] = defaultdict(list)
    for shard in chosen:
        read = read_features(read_output(store, run_uri, shard))
        found: dict[str, list[SampledUtterance]] = defaultdict(list)
        for each in map(SampledUtterance, read, heard_versions(read, config.versions)):
            found[each.placement].append(each)
        for placement, rows in found.items():
            best[placement] = [
                # The features are views of a whole shard, which is not kept.
                SampledUtterance(
                    *(replace(row, features=row.features.copy()) for row in (each.row, each.heard))
                )
                for each in nsmallest(MAX_UTTERANCES, [*rows, *best[placement]], key=priority)
            ]
    share = NUM_FRAMES // max(len(best), 1)
    sample: list[SampledUtterance] = []
    for _, rows in sorted(best.items()):
        ends = np.cumsum([num_low_rate_frames(len(each.row.features), 0) for each in rows])
        sample += rows[: max(1, int((ends <= share).sum()))]
    return sample


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
