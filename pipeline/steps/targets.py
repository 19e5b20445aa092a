"""Target generation: the teacher's k best logits for each feature shard (paper 003 IV-B3, V-C)."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float32

from infra.configuration import LATER, plain
from infra.ranges import Range, Seed, check_ranges
from infra.store.object_store import ObjectStore
from pipeline.kbest import KBest, KBestWithoutLattice, require_below_k, retained_mass
from pipeline.placement_versions import Versions, heard_versions
from pipeline.records import Tally
from pipeline.runs.commit import Commit, Repetition, StepContext, once
from pipeline.runs.loss_watch import WITHOUT_LATTICE
from pipeline.runs.manifest import Output, read_manifest, read_output
from pipeline.runs.names import (
    ONLY_ROUND,
    TEACHER,
    UNLABELLED,
    TargetsRound,
    features_step,
    model_step,
    task_name,
)
from pipeline.runs.step import (
    Distribute,
    StepContents,
    StepResult,
    StepSpec,
    TaskPlan,
    run_step,
    run_tasks,
)
from pipeline.sampling import sampling_priority
from pipeline.shards import (
    FeatureRow,
    KBestAtAllOffsets,
    Offsets,
    StoredKBest,
    TargetRow,
    read_features,
    write_targets,
)
from pipeline.splicing import STACK, splice

Teacher = Callable[[list[Float32[np.ndarray, "_frames 192"]], list[int]], Sequence[KBest]]
"""Spliced utterances, and the seeds of their tails' draws, to their k best logits.

In the same order; called in the workers.
"""

HEARD_ELSEWHERE = "num_heard_elsewhere"
"""The statistic of the utterances that have the targets of a clearer version."""

SEARCH_ENGINES = ("kaldi-decoder", "kaldifst", "scipy")
"""The distributions that lattices depend on."""


@dataclass(frozen=True, slots=True)
class TargetsConfig:
    """`k` logits a frame; a request to the teacher holds about `request_frames` low-rate frames.

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
) -> StepResult:
    """Write the unlabelled subset's target shards, in the order of its feature shards.

    `models` are the names of the teacher's model, or of those of an ensemble. A teacher that makes
    lattices reads the steps `graphs`; at most the share `loss_budget` of the utterances may have
    none.
    """
    features = features_step(UNLABELLED)

    def label(context: StepContext) -> StepContents:
        extracted = read_manifest(store, run_uri, features)
        tasks = {
            task_name(number): ShardTask(context, config, task_name(number), output, teacher)
            for number, output in enumerate(extracted.outputs)
        }
        # All features that were extracted are labelled, with or without lattices.
        plan = TaskPlan(
            tasks,
            label_shard,
            distribute,
            loss_budget,
            statistics=label_statistics,
            num_utterances=extracted.tally_out.utterances,
        )
        return run_tasks(context, plan)

    spec = StepSpec(
        store,
        run_uri,
        targets_round.targets,
        plain(config),
        [features, *map(model_step, models), *graphs],
        # Logits differ in their last bits between devices, and with their neighbours in a batch.
        repetition=Repetition.OTHER_LAST_BITS,
        engines=SEARCH_ENGINES if graphs else (),
    )
    return run_step(spec, label)


def label_statistics(commits: Sequence[Commit]) -> dict[str, Any]:
    """Mean share of the targets' probability that the k best hold (V-C), and frames labelled.

    With how many utterances have no lattice, by reason, if there are some, and how many have the
    targets of a clearer version.
    """
    num_elsewhere = sum(commit.statistics.get(HEARD_ELSEWHERE, 0) for commit in commits)
    num_frames = sum(commit.statistics["num_frames"] for commit in commits)
    mass = sum(commit.statistics["retained_mass"] for commit in commits)
    reasons = Counter(
        each["reason"]
        for commit in commits
        for each in commit.statistics.get(WITHOUT_LATTICE, {}).values()
    )
    return {
        "num_frames": num_frames,
        "mean_retained_mass": mass / max(num_frames, 1),
        **({WITHOUT_LATTICE: dict(sorted(reasons.items()))} if reasons else {}),
        **({HEARD_ELSEWHERE: num_elsewhere} if num_elsewhere else {}),
    }


@once
def label_shard(task: ShardTask) -> Commit:
    """Splice each utterance at its own offset, or at all, and keep the teacher's k best."""
    rows = read_features(read_output(task.context.store, task.context.run_uri, task.features))
    # A hash of the id chooses the offset, so every partition mixes all three.
    offsets = [sampling_priority(task.config.seed, row.utterance_id) % STACK for row in rows]
    heard = heard_versions(rows, task.config.versions)
    num_elsewhere = sum(one is not other for one, other in zip(rows, heard, strict=True))
    turns = label_turns(task, heard, offsets)
    by_row = list(zip(*turns, strict=True))
    data = write_targets(
        [
            TargetRow(row.utterance_id, offset, stored_targets(offset, labelled))
            for row, offset, labelled in zip(rows, offsets, by_row, strict=True)
        ]
    )
    kbest = [target for turn in turns for target in turn]
    tally = Tally(len(rows), sum(row.duration_ms for row in rows))
    record = Commit(
        task=task.name,
        fingerprint=task.context.fingerprint,
        outputs=(task.context.put_output(task.name, ".parquet", data, tally),),
        ledger=None,
        tally_in=tally,
        quarantined=Tally(),
        statistics={
            "num_frames": sum(len(target.log_z) for target in kbest),
            # 003 V-C calls this mass dominant without a figure; the demo's is 94.5 %.
            "retained_mass": sum(float(retained_mass(target).sum()) for target in kbest),
            **without_lattice(rows, by_row),
            **({HEARD_ELSEWHERE: num_elsewhere} if num_elsewhere else {}),
        },
    )
    return task.context.commit(record)


def label_turns(
    task: ShardTask, heard: Sequence[FeatureRow], offsets: Sequence[int]
) -> list[list[KBest]]:
    """Label each utterance at its offset, and in two more turns at the next ones if all are asked.

    What several versions hear is labelled once.
    """
    turns: list[list[KBest]] = []
    done: dict[tuple[str, int], KBest] = {}
    for turn in range(STACK if task.config.offsets == "all" else 1):
        keys = [
            (row.utterance_id, (offset + turn) % STACK)
            for row, offset in zip(heard, offsets, strict=True)
        ]
        new = {key: row for key, row in zip(keys, heard, strict=True) if key not in done}
        # The first turn's requests are those of one offset, so its targets have the same bits.
        found = label_at(task, list(new.values()), [offset for _, offset in new])
        done |= zip(new, found, strict=True)
        turns.append([done[key] for key in keys])
    return turns


def label_at(task: ShardTask, rows: Sequence[FeatureRow], offsets: Sequence[int]) -> list[KBest]:
    """Label each utterance at its offset; draws from its tail depend on both and the seed."""
    spliced = [
        splice(row.features, offset).astype(np.float32)
        for row, offset in zip(rows, offsets, strict=True)
    ]
    seeds = (
        tail_seed(task.config.seed, row.utterance_id, offset)
        for row, offset in zip(rows, offsets, strict=True)
    )
    # A request holds many utterances, as a GPU needs batches (003 IV-A4, IV-B3).
    return [
        target
        for request in requests(spliced, task.config)
        for target in task.teacher(request, list(islice(seeds, len(request))))
    ]


def tail_seed(seed: int, utterance_id: str, offset: int) -> int:
    """Hash an utterance at an offset to the 64 bits that seed the draws of its tail."""
    # Another text than that of the draw of the offset, which is of the id alone.
    return sampling_priority(seed, f"tail {offset} {utterance_id}")


def stored_targets(first: int, turns: Sequence[KBest]) -> StoredKBest:
    """Return what a shard holds of an utterance that was labelled at offset `first` and the next.

    One turn is the targets at one offset; three are those at all.
    """
    if len(turns) == 1:
        return turns[0]
    return KBestAtAllOffsets.of([turns[(offset - first) % STACK] for offset in range(STACK)])


def without_lattice(
    rows: Sequence[FeatureRow], labelled: Sequence[Sequence[KBest]]
) -> Mapping[str, Mapping[str, Mapping[str, str]]]:
    """Return why utterances have no lattice, by their ids, as a statistic if there are some.

    An utterance that has none at one of its offsets counts as one without.
    """
    found = {
        row.utterance_id: {"reason": kbest.reason, "detail": kbest.detail}
        for row, turns in zip(rows, labelled, strict=True)
        for kbest in turns
        if isinstance(kbest, KBestWithoutLattice)
    }
    return {WITHOUT_LATTICE: found} if found else {}


def requests(
    spliced: Sequence[Float32[np.ndarray, "_frames 192"]], config: TargetsConfig
) -> list[list[Float32[np.ndarray, "_frames 192"]]]:
    """Cut the utterances, in order, into requests of about `request_frames` frames, none empty."""
    batches: list[list[Float32[np.ndarray, "_frames 192"]]] = []
    num_frames = 0
    for frames in spliced:
        if not batches or num_frames + len(frames) > config.request_frames:
            batches.append([])
            num_frames = 0
        batches[-1].append(frames)
        num_frames += len(frames)
    return batches
