"""Target generation: the teacher's k best logits for each feature shard (paper 003 IV-B3, V-C)."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Annotated, Any

from infra.configuration import LATER, plain
from infra.ranges import Range, Seed, check_ranges
from infra.store.object_store import ObjectStore
from pipeline.kbest import (
    KBest,
    TeacherFailure,
    require_below_k,
)
from pipeline.placement_versions import Versions, distinct, heard_versions
from pipeline.records import Tally
from pipeline.runs.commit import Commit, Repetition, StepContext, once
from pipeline.runs.increment import BaseStep, read_base
from pipeline.runs.loss_watch import WITHOUT_LATTICE
from pipeline.runs.manifest import Output, own_outputs, read_manifest, read_output
from pipeline.runs.many_tasks import Folding, NumberedTasks, runner_of
from pipeline.runs.names import (
    BOOTSTRAP_STEP,
    ONLY_ROUND,
    TEACHER,
    UNLABELLED,
    TargetsRound,
    features_step,
    model_step,
)
from pipeline.runs.step import (
    Distribute,
    StepContents,
    StepResult,
    StepSpec,
    TaskPlan,
    run_step,
)
from pipeline.sampling import sampling_priority
from pipeline.shards import (
    FeatureRow,
    Offsets,
    read_features,
    write_targets,
)
from pipeline.splicing import STACK
from pipeline.steps.labelled_utterances import (
    HEARD_ELSEWHERE,
    Labelled,
    num_elsewhere,
    quarantined,
    shard_statistics,
    tally_of,
)
from pipeline.steps.teacher_inputs import FeatureHearing, Hearing, TeacherInput

Teacher = Callable[[Iterable[TeacherInput]], Iterator[KBest | TeacherFailure]]
"""A stream of utterances to their k best logits, in the same order; called in the workers."""

FEATURES = FeatureHearing()

MEAN_MASS = "mean_retained_mass"
LATTICE_REASONS = "lattice_reasons"
"""The statistic of several tasks that counts their utterances without a lattice by reason."""

SEARCH_ENGINES = ("kaldi-decoder", "kaldifst", "scipy")
"""The distributions that lattices depend on."""


@dataclass(frozen=True, slots=True)
class TargetsConfig:
    """`k` logits a frame; a batch of the teacher has at most `request_frames` low-rate frames.

    The last `tail_samples` of the k are drawn from the senones beyond the best. An utterance has
    targets at one of its offsets, which the seed draws, or at all three. Of one that ingest
    simulated in several placements, the teacher hears each version itself, or for all of them the
    clearest: what is clean to the teacher is then in a room to the student.
    """

    k: Annotated[int, Range(1, 255)]
    request_frames: Annotated[int, Range(1, 1_000_000)]
    seed: Seed
    offsets: Offsets = field(default="one", metadata=LATER)
    versions: Versions = field(default="own", metadata=LATER)
    tail_samples: Annotated[int, Range(0, 254)] = field(default=0, metadata=LATER)

    def __post_init__(self) -> None:
        check_ranges(self)
        require_below_k(self.tail_samples, self.k)


@dataclass(frozen=True, slots=True)
class ShardTask:
    """One feature shard to label."""

    context: StepContext
    config: TargetsConfig
    name: str
    features: Output
    teacher: Teacher
    hearing: Hearing


def generate_targets(
    store: ObjectStore,
    run_uri: str,
    config: TargetsConfig,
    teacher: Teacher,
    distribute: Distribute,
    models: Sequence[str] = (TEACHER,),
    graphs: Sequence[str] = (),
    loss_budget: float = 0.0,
    targets_round: TargetsRound = ONLY_ROUND,
    hearing: Hearing = FEATURES,
) -> StepResult:
    """Write the unlabelled subset's target shards, in the order of its feature shards.

    `models` are the names of the teacher's model, or of those of an ensemble; without any the
    teacher is the user's own, of the senones of the run's tree. A teacher that makes lattices reads
    the steps `graphs`; at most the share `loss_budget` of the utterances may have none.
    """
    features, settings = features_step(UNLABELLED), plain(config)
    labelling = [*(map(model_step, models) if models else [BOOTSTRAP_STEP]), *graphs]
    base = read_base(store, run_uri, targets_round.targets, settings)

    def label(context: StepContext) -> StepContents:
        extracted = read_manifest(store, run_uri, features)
        shards = own_outputs(extracted.outputs) if base else extracted.outputs

        def task(name: str, output: Output) -> ShardTask:
            return ShardTask(context, config, name, output, teacher, hearing)

        # All features that were extracted are labelled, with or without lattices.
        plan = TaskPlan(
            NumberedTasks(shards, task),
            label_shard,
            distribute,
            loss_budget,
            statistics=label_statistics,
            num_utterances=sum(shard.utterances for shard in shards),
            size=lambda task: task.features.duration_ms,
        )
        contents = runner_of(plan, Folding(sum_labels))(context, plan)
        return extend(base, context, contents) if base else contents

    place = store, run_uri, targets_round.targets
    reads, digests = [features, *labelling], base.digests if base else {}
    # Logits differ in their last bits between kinds of devices, which hosts may have several of.
    repetition = Repetition.OTHER_LAST_BITS
    engines = (*(SEARCH_ENGINES if graphs else ()), *hearing.engines)
    return run_step(StepSpec(*place, settings, reads, digests, repetition, engines), label)


def extend(base: BaseStep, context: StepContext, own: StepContents) -> StepContents:
    """Join an increment's targets with those of its base, and average over the frames of both."""
    before = base.manifest
    frames = [before.statistic("num_frames", int), own.statistics["num_frames"]]
    means = [before.statistic(MEAN_MASS, float), own.statistics[MEAN_MASS]]
    masses = [mean * count for mean, count in zip(means, frames, strict=True)]
    reasons = Counter(before.statistic(WITHOUT_LATTICE, dict[str, int], {}))
    reasons.update(own.statistics.get(WITHOUT_LATTICE, {}))
    elsewhere = before.statistic(HEARD_ELSEWHERE, int, 0)
    elsewhere += own.statistics.get(HEARD_ELSEWHERE, 0)
    statistics = {
        "num_frames": sum(frames),
        MEAN_MASS: sum(masses) / max(sum(frames), 1),
        **({WITHOUT_LATTICE: dict(sorted(reasons.items()))} if reasons else {}),
        **({HEARD_ELSEWHERE: elsewhere} if elsewhere else {}),
    }
    return base.extended_by(context, replace(own, statistics=statistics))


def label_statistics(commits: Sequence[Commit]) -> dict[str, Any]:
    """Mean share of the targets' probability that the k best hold (V-C), and frames labelled.

    With how many utterances have no lattice, by reason, if there are some, and how many have the
    targets of a clearer version.
    """
    sums = sum_labels(commits)
    return {
        "num_frames": sums["num_frames"],
        MEAN_MASS: sums["retained_mass"] / max(sums["num_frames"], 1),
        **({WITHOUT_LATTICE: reasons} if (reasons := sums[LATTICE_REASONS]) else {}),
        **({HEARD_ELSEWHERE: number} if (number := sums[HEARD_ELSEWHERE]) else {}),
    }


def sum_labels(commits: Sequence[Commit]) -> dict[str, Any]:
    """Add up the statistics of tasks, or of tasks that were added up before."""
    reasons: Counter[str] = Counter()
    for statistics in (commit.statistics for commit in commits):
        reasons.update(statistics.get(LATTICE_REASONS, {}))
        reasons.update(each["reason"] for each in statistics.get(WITHOUT_LATTICE, {}).values())
    return {
        "num_frames": sum(commit.statistics["num_frames"] for commit in commits),
        "retained_mass": sum(commit.statistics["retained_mass"] for commit in commits),
        HEARD_ELSEWHERE: sum(commit.statistics.get(HEARD_ELSEWHERE, 0) for commit in commits),
        LATTICE_REASONS: dict(sorted(reasons.items())),
    }


@once
def label_shard(task: ShardTask) -> Commit:
    """Splice each utterance at its own offset, or at all, and keep the teacher's k best.

    An utterance that the teacher fails at is in the ledger, not in the shard.
    """
    rows = read_features(read_output(task.context.store, task.context.run_uri, task.features))
    # A hash of the id chooses the offset, so every partition mixes all three.
    offsets = [sampling_priority(task.config.seed, row.utterance_id) % STACK for row in rows]
    heard = heard_versions(rows, task.config.versions)
    labels = label_all(task, heard, offsets)
    found = [Labelled(*each) for each in zip(rows, offsets, labels, strict=True)]
    labelled = [each for each in found if not each.failures]
    lost = [quarantined(each) for each in found if each.failures]
    data = write_targets([each.target_row() for each in labelled])
    tally = tally_of([each.row for each in labelled])
    record = Commit(
        task=task.name,
        fingerprint=task.context.fingerprint,
        outputs=(task.context.put_output(task.name, ".parquet", data, tally),),
        ledger=task.context.put_ledger(task.name, lost),
        tally_in=tally_of(rows),
        quarantined=Tally.of(lost),
        statistics=shard_statistics(labelled, num_elsewhere(rows, heard)),
    )
    return task.context.commit(record)


def label_all(
    task: ShardTask, heard: Sequence[FeatureRow], offsets: Sequence[int]
) -> list[list[KBest | TeacherFailure]]:
    """Label each utterance at its offset, and at the next two if all are asked.

    What several versions hear is read and labelled once. Draws from the tail depend on the heard
    utterance, the offset and the seed.
    """
    num_turns = STACK if task.config.offsets == "all" else 1
    keys = [
        [(row.utterance_id, (offset + turn) % STACK) for turn in range(num_turns)]
        for row, offset in zip(heard, offsets, strict=True)
    ]
    done = label_heard(task, distinct(heard), list(chain.from_iterable(keys)))
    return [[done[key] for key in turns] for turns in keys]


def label_heard(
    task: ShardTask, rows: Sequence[FeatureRow], keys: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], KBest | TeacherFailure]:
    """Label each utterance at the offsets that the keys name; what is not heard has no targets."""
    offsets: dict[str, dict[int, None]] = {row.utterance_id: {} for row in rows}
    for utterance_id, offset in keys:
        offsets[utterance_id][offset] = None
    sent: list[tuple[str, int]] = []
    failed: dict[tuple[str, int], KBest | TeacherFailure] = {}

    def inputs() -> Iterator[TeacherInput]:
        for row, found in zip(rows, task.hearing.listen(rows), strict=True):
            for offset in offsets[row.utterance_id]:
                key = row.utterance_id, offset
                if isinstance(found, TeacherFailure):
                    failed[key] = found
                    continue
                sent.append(key)
                yield TeacherInput(found(offset), tail_seed(task.config.seed, *key))

    answers = list(task.teacher(inputs()))
    return {**dict(zip(sent, answers, strict=True)), **failed}


def tail_seed(seed: int, utterance_id: str, offset: int) -> int:
    """Hash an utterance at an offset to the 64 bits that seed the draws of its tail."""
    # Another text than that of the draw of the offset, which is of the id alone.
    return sampling_priority(seed, f"tail {offset} {utterance_id}")
