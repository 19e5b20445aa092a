"""Target generation: the teacher's k best logits for each feature shard (paper 003 IV-B3, V-C).

A teacher gets the features of an utterance, or its audio, which is then fetched and decoded again.
Frames of both are 30 ms apart, so that requests, windows and batches count frames whatever a
teacher gets. An utterance without targets becomes a row of the ledger.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32

from infra.store.object_store import ObjectStore
from pipeline.filterbank import SHIFT_SAMPLES, STACK
from pipeline.kbest import KBest, KBestOfTranscript, OwnKBest, TeacherFailure, retained_mass
from pipeline.placement_versions import distinct, heard_versions
from pipeline.records import Hypothesis, Quarantined, Tally
from pipeline.runs.commit import Commit, Repetition, StepContext, once
from pipeline.runs.engine import (
    WITHOUT_LATTICE,
    Distribute,
    Extension,
    NumberedTasks,
    Statistics,
    StepResult,
    StepRun,
    StepSpec,
    TaskPlan,
    run_step,
    run_tasks,
)
from pipeline.runs.manifest import Manifest, Output, read_manifest
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    ONLY_ROUND,
    TEACHER,
    UNLABELLED,
    TargetsRound,
    features_step,
    model_step,
)
from pipeline.sampling import sampling_priority
from pipeline.settings import TargetsConfig
from pipeline.shards import (
    FeatureRow,
    KBestAtAllOffsets,
    StoredKBest,
    TargetRow,
    read_features,
    write_targets,
)
from pipeline.splicing import splice

SAMPLES_PER_FRAME = STACK * SHIFT_SAMPLES
"""The samples of 30 ms, from one low-rate frame's beginning to the next one's: 480."""

Frames = Float32[np.ndarray, "_frames _values"]
FramesAt = Callable[[int], Frames]
"""An offset, 0, 1 or 2, to the utterance's low-rate frames from there on."""


@dataclass(frozen=True, slots=True, eq=False)
class TeacherInput:
    """TeacherInput: an utterance's low-rate frames, and the seed of the draws from its tail.

    A frame has NUM_INPUTS features, or the 480 samples of its 30 ms. `hypotheses` are what
    recognizers heard.
    """

    frames: Frames
    seed: int
    hypotheses: tuple[Hypothesis, ...] = ()


@runtime_checkable
class FrameSource(Protocol):
    """FrameSource reads utterances for a teacher; `engines` are the distributions that it uses."""

    engines: ClassVar[tuple[str, ...]]

    def frames_of(self, rows: Sequence[FeatureRow]) -> Iterator[FramesAt | TeacherFailure]:
        """Yield the frames of each utterance, in order, or why there are none."""
        ...


@dataclass(frozen=True, slots=True)
class FeatureSource:
    """FeatureSource: the spliced log-mel energies, after subtraction of the causal mean."""

    engines: ClassVar[tuple[str, ...]] = ()

    def frames_of(self, rows: Sequence[FeatureRow]) -> Iterator[FramesAt | TeacherFailure]:
        """Yield the rows' own features."""
        return (partial(spliced_frames, row) for row in rows)


def spliced_frames(row: FeatureRow, offset: int) -> Float32[np.ndarray, "_frames dim"]:
    """Splice an utterance's features from an offset on."""
    return splice(row.features, offset).astype(np.float32)


TEACHER_FAILED = "teacher_failed"
"""The ledger's reason of an utterance that the teacher cannot label, even alone."""

HEARD_ELSEWHERE = "num_heard_elsewhere"
"""The statistic of the utterances that have the targets of a clearer version."""


Teacher = Callable[[Iterable[TeacherInput]], Iterator[KBest | TeacherFailure]]
"""A stream of utterances to their k best logits, in the same order; called in the workers."""

FEATURES = FeatureSource()

MEAN_MASS = "mean_retained_mass"
MEAN_TRANSCRIPT = "mean_transcript_share"
"""The share of the targets that is of recognizers' transcripts, over all frames."""

WITHOUT_TRANSCRIPT = "without_transcript"
"""The statistic of the utterances that keep the teacher's own targets for want of a transcript."""

SUMS_OF_MEANS = {MEAN_MASS: "retained_mass", MEAN_TRANSCRIPT: "transcript_mass"}
"""The statistics of tasks of which a manifest states the means over all frames."""

REASONS = {WITHOUT_LATTICE: "lattice_reasons", WITHOUT_TRANSCRIPT: "transcript_reasons"}
"""The statistics of several tasks that count their utterances without lattice or transcript."""

SEARCH_ENGINES = ("kaldifst", "scipy")
"""The distributions that lattices depend on."""


@dataclass(frozen=True, slots=True)
class TargetsSearch:
    """TargetsSearch: what targets depend on whose tasks make lattices, or align transcripts.

    They read steps, and other inputs by digest; their settings are beside those of `[targets]`.
    """

    reads: Sequence[str]
    settings: Mapping[str, Any]
    engines: Sequence[str] = SEARCH_ENGINES
    digests: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ShardTask:
    """One feature shard to label."""

    context: StepContext
    config: TargetsConfig
    name: str
    features: Output
    teacher: Teacher
    source: FrameSource


def generate_targets(
    store: ObjectStore,
    run_uri: str,
    config: TargetsConfig,
    teacher: Teacher,
    distribute: Distribute,
    models: Sequence[str] = (TEACHER,),
    search: TargetsSearch | None = None,
    loss_budget: float = 0.0,
    targets_round: TargetsRound = ONLY_ROUND,
    source: FrameSource = FEATURES,
) -> StepResult:
    """Write the unlabelled subset's target shards, in the order of its feature shards.

    `models` are the names of the teacher's model, or of those of an ensemble; without any the
    teacher is the user's own, of the senones of the run's tree. With a `search` at most the share
    `loss_budget` of the utterances may have none of its labels.
    """
    features = features_step(UNLABELLED)
    labelling = [*map(model_step, models)] or [ALIGNMENT_STEP]
    labelling += search.reads if search else ()

    def label(step: StepRun) -> Manifest:
        shards = read_manifest(store, run_uri, features).own_outputs

        def task(name: str, output: Output) -> ShardTask:
            return ShardTask(step.context, config, name, output, teacher, source)

        # All features that were extracted are labelled, with or without lattices.
        plan = TaskPlan(
            NumberedTasks(shards, task),
            label_shard,
            distribute,
            loss_budget,
            fold=sum_labels,
            statistics=label_statistics,
            num_utterances=sum(shard.utterances for shard in shards),
            size=lambda task: task.features.duration_ms,
        )
        return run_tasks(step, plan)

    spec = StepSpec(
        store,
        run_uri,
        targets_round.targets,
        {**config.settings, **(search.settings if search else {})},
        [features, *labelling],
        search.digests if search else {},
        # Logits differ in their last bits between kinds of devices; a host may have several kinds.
        repetition=Repetition.OTHER_LAST_BITS,
        engines=(*(search.engines if search else ()), *source.engines),
        extension=Extension(extended_statistics),
    )
    return run_step(spec, label)


def extended_statistics(before: Manifest, own: Statistics) -> Statistics:
    """Average over the frames of an increment and its base, and add up what is special."""
    base = {
        "num_frames": before.statistic("num_frames", int),
        HEARD_ELSEWHERE: before.statistic(HEARD_ELSEWHERE, int, 0),
        **{name: before.statistic(name, float, 0.0) for name in SUMS_OF_MEANS},
        **{name: before.statistic(name, dict[str, int], {}) for name in REASONS},
    }
    sums = [
        {
            "num_frames": each["num_frames"],
            HEARD_ELSEWHERE: each.get(HEARD_ELSEWHERE, 0),
            **{
                total: each.get(mean, 0.0) * each["num_frames"]
                for mean, total in SUMS_OF_MEANS.items()
            },
            **{counted: each.get(name, {}) for name, counted in REASONS.items()},
        }
        for each in (base, own)
    ]
    return label_statistics(sum_labels(sums))


def label_statistics(sums: Statistics) -> Statistics:
    """Mean share of the targets' probability that the k best hold (V-C), and frames labelled.

    With how many utterances have no lattice or transcript, by reason, how much of the targets is of
    transcripts, and how many utterances have the targets of a clearer version, if there are some.
    """
    num_frames = sums["num_frames"]
    special = {
        **{mean: sums[total] / max(num_frames, 1) for mean, total in SUMS_OF_MEANS.items()},
        **{name: dict(sorted(sums[counted].items())) for name, counted in REASONS.items()},
        HEARD_ELSEWHERE: sums[HEARD_ELSEWHERE],
    }
    mean_mass = special.pop(MEAN_MASS)
    some = {name: value for name, value in special.items() if value}
    return {"num_frames": num_frames, MEAN_MASS: mean_mass, **some}


def sum_labels(tasks: Sequence[Statistics]) -> Statistics:
    """Add up the statistics of tasks, or of tasks that were added up before."""
    reasons = {counted: Counter[str]() for counted in REASONS.values()}
    for statistics in tasks:
        for name, counted in REASONS.items():
            reasons[counted].update(statistics.get(counted, {}))
            reasons[counted].update(each["reason"] for each in statistics.get(name, {}).values())
    return {
        "num_frames": sum(each["num_frames"] for each in tasks),
        "retained_mass": sum(each["retained_mass"] for each in tasks),
        "transcript_mass": sum(each.get("transcript_mass", 0.0) for each in tasks),
        HEARD_ELSEWHERE: sum(each.get(HEARD_ELSEWHERE, 0) for each in tasks),
        **reasons,
    }


@once
def label_shard(task: ShardTask) -> Commit:
    """Splice each utterance at its own offset, or at all, and keep the teacher's k best.

    An utterance that the teacher fails at is in the ledger, not in the shard.
    """
    rows = read_features(task.context.read(task.features))
    # A hash of the id chooses the offset, so every partition mixes all three.
    offsets = [sampling_priority(task.config.seed, row.utterance_id) % STACK for row in rows]
    heard = heard_versions(rows, task.config.versions)
    labels = label_all(task, heard, offsets)
    labelled: list[FeatureRow] = []
    targets: list[TargetRow] = []
    lost: list[Quarantined] = []
    num_labelled = 0
    mass: float = 0
    transcript_mass: float = 0
    own = defaultdict[str, dict[str, dict[str, str]]](dict)
    for row, first, turns in zip(rows, offsets, labels, strict=True):
        if failed := next((each for each in turns if isinstance(each, TeacherFailure)), None):
            lost.append(Quarantined.of(row, TEACHER_FAILED, failed.reason))
            continue
        found = [each for each in turns if isinstance(each, KBest)]
        labelled.append(row)
        targets.append(TargetRow(row.utterance_id, first, stored_targets(first, found)))
        for kbest in found:
            num_labelled += len(kbest.log_z)
            # 003 V-C calls this mass dominant without a figure; the demo's is 94.5 %.
            mass += float(retained_mass(kbest).sum())
            if isinstance(kbest, KBestOfTranscript):
                transcript_mass += kbest.transcript_share * len(kbest.log_z)
            # An utterance without a lattice at one of its offsets counts as one without.
            if isinstance(kbest, OwnKBest):
                why = {"reason": kbest.reason, "detail": kbest.detail}
                own[kbest.statistic][row.utterance_id] = why
    num_elsewhere = sum(row is not each for row, each in zip(rows, heard, strict=True))
    data = write_targets(targets)
    record = Commit(
        task=task.name,
        fingerprint=task.context.fingerprint,
        outputs=(task.context.put_output(task.name, ".parquet", data, Tally.of(labelled)),),
        ledger=task.context.put_ledger(task.name, lost),
        tally_in=Tally.of(rows),
        quarantined=Tally.of(lost),
        statistics={
            "num_frames": num_labelled,
            "retained_mass": mass,
            **({"transcript_mass": transcript_mass} if transcript_mass else {}),
            **own,
            **({HEARD_ELSEWHERE: num_elsewhere} if num_elsewhere else {}),
        },
    )
    return task.context.commit(record)


def stored_targets(first: int, turns: Sequence[KBest]) -> StoredKBest:
    """Return what a shard holds of an utterance that was labelled at offset `first` and the next.

    One turn is the targets at one offset; three are those at all.
    """
    if len(turns) == 1:
        return turns[0]
    return KBestAtAllOffsets.of([turns[(offset - first) % STACK] for offset in range(STACK)])


def label_all(
    task: ShardTask, heard: Sequence[FeatureRow], offsets: Sequence[int]
) -> list[list[KBest | TeacherFailure]]:
    """Label each utterance at its offset, and at the next two if all are asked.

    What several versions hear is read and labelled once; what cannot be read has no targets. Draws
    from the tail depend on the heard utterance, the offset and the seed.
    """
    num_turns = STACK if task.config.offsets == "all" else 1
    keys = [
        [(row.utterance_id, (offset + turn) % STACK) for turn in range(num_turns)]
        for row, offset in zip(heard, offsets, strict=True)
    ]
    distinct_rows = distinct(heard)
    offsets_of: dict[str, dict[int, None]] = {row.utterance_id: {} for row in distinct_rows}
    for utterance_id, offset in chain.from_iterable(keys):
        offsets_of[utterance_id][offset] = None
    sent: list[tuple[str, int]] = []
    done: dict[tuple[str, int], KBest | TeacherFailure] = {}

    def inputs() -> Iterator[TeacherInput]:
        for row, found in zip(distinct_rows, task.source.frames_of(distinct_rows), strict=True):
            for offset in offsets_of[row.utterance_id]:
                key = row.utterance_id, offset
                if isinstance(found, TeacherFailure):
                    done[key] = found
                    continue
                sent.append(key)
                seed = tail_seed(task.config.seed, *key)
                yield TeacherInput(found(offset), seed, row.hypotheses)

    done |= zip(sent, list(task.teacher(inputs())), strict=True)
    return [[done[key] for key in turns] for turns in keys]


def tail_seed(seed: int, utterance_id: str, offset: int) -> int:
    """Hash an utterance at an offset to the 64 bits that seed the draws of its tail."""
    # Another text than that of the draw of the offset, which is of the id alone.
    return sampling_priority(seed, f"tail {offset} {utterance_id}")
