"""Align shards phone by phone, grow the tree from the statistics of all, and label their frames.

A step does so in three passes, each of whose tasks is committed once. A task for each shard aligns
it, and stores its phones and the statistics of its triphones. The driver adds the statistics up and
grows the tree, as 003 VII-C2 grew it on all labelled hours. A task for each shard then writes the
senone of every frame.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64

from infra.prefetch import prefetch
from pipeline.placement_versions import distinct, heard_versions, shared_by_versions
from pipeline.records import Tally
from pipeline.runs.commit import Commit, StepContext, once
from pipeline.runs.engine import (
    Distribute,
    NumberedTasks,
    ScratchTasks,
    Statistics,
    StepRun,
    TaskPlan,
    run_tasks,
)
from pipeline.runs.manifest import Manifest, Output, read_manifest, read_output
from pipeline.runs.names import LABELLED, PHONES_PREFIX, features_step, task_name
from pipeline.settings import Versions
from pipeline.shards import FeatureRow, read_features
from training.align.labelled import (
    Senones,
    commit_aligned,
    senone_statistics,
    sum_histograms,
    unknown_words_of,
)
from training.align.lda_mllt import tree_features
from training.align.monophone_hmm import speaker_cepstra
from training.align.tree_growing import TriphoneStatistics, grow_tree, triphone_statistics
from training.array_encoding import decode_arrays, encode_arrays
from training.decode.lexicon import Lexicon
from training.decode.senones import (
    PhoneAlignment,
    SenoneTree,
    Unaligned,
    parse_senone_tree,
    senone_alignment,
)
from training.settings.decoding import TreeConfig

READ_AHEAD = 4
"""Shards' statistics in memory while they are added up, of some 10 MB at five hours."""

Phones = Mapping[str, PhoneAlignment | Unaligned]
"""By utterance id the phones, or why there are none."""


@dataclass(frozen=True, slots=True)
class PhoneAligner(ABC):
    """PhoneAligner aligns utterances phone by phone; the tree is grown on their `tree_features`.

    These are cepstra, transformed by `lda_mllt` where the run has it.
    """

    lexicon: Lexicon
    lda_mllt: Float64[np.ndarray, "_rows 117"] | None

    @abstractmethod
    def align(
        self, rows: Sequence[FeatureRow], cepstra: Mapping[str, Float32[np.ndarray, "_frames 39"]]
    ) -> Phones:
        """Align utterances whose words the lexicon has, given their normalized cepstra."""


@dataclass(frozen=True, slots=True)
class PhonesTask:
    """PhonesTask is one feature shard to align phone by phone, by what `load` reads."""

    context: StepContext
    name: str
    features: Output
    load: Callable[[StepContext], PhoneAligner]
    versions: Versions


@dataclass(frozen=True, slots=True)
class SenonesTask:
    """SenonesTask is one feature shard whose `phones` the step's tree maps to senones."""

    context: StepContext
    name: str
    features: Output
    phones: Output
    versions: Versions


def align_and_grow(
    step: StepRun,
    load: Callable[[StepContext], PhoneAligner],
    versions: Versions,
    phones: tuple[str, ...],
    config: TreeConfig,
    loss_budget: float,
    distribute: Distribute,
    about: Statistics = MappingProxyType({}),
) -> Manifest:
    """Align all labelled shards, grow the tree on them, and write the senone of every frame.

    Each task calls `load` for its aligner, which hears `versions` of each utterance. The manifest
    carries the tree, what bounded its growth, its senones' frames, and what `about` says.
    """
    context = step.context
    shards = read_manifest(context.store, context.run_uri, features_step(LABELLED))
    tasks = [
        PhonesTask(context.scratch, f"{PHONES_PREFIX}{task_name(number)}", output, load, versions)
        for number, output in enumerate(shards.outputs)
    ]
    aligned = ScratchTasks(context, distribute).run(tasks, align_shard_phones, "align phones")
    grown = _grown(context, [commit.outputs[1] for commit in aligned], phones, config)
    tree = parse_senone_tree(grown["senone_tree"])

    def task(name: str, output: Output) -> SenonesTask:
        return SenonesTask(context, name, output, aligned[int(name)].outputs[0], versions)

    def statistics(sums: Statistics) -> Statistics:
        bound = {"senone_bound": grown["senone_bound"]}
        return {**senone_statistics(tree, sums), **bound, **about}

    plan = TaskPlan(
        NumberedTasks(shards.outputs, task),
        write_shard_senones,
        distribute,
        loss_budget,
        fold=sum_histograms,
        statistics=statistics,
        num_utterances=shards.tally_out.utterances,
        size=lambda task: task.features.duration_ms,
    )
    return run_tasks(step, plan)


@once
def align_shard_phones(task: PhonesTask) -> Commit:
    """Store a shard's phones and, as the second output, its triphones' statistics."""
    context = task.context
    aligner = task.load(context)
    rows = read_features(read_output(context.store, context.run_uri, task.features))
    found: dict[str, PhoneAlignment | Unaligned] = {}
    known: list[FeatureRow] = []
    for row in distinct(heard_versions(rows, task.versions)):
        if unknown := unknown_words_of(row, aligner.lexicon):
            found[row.utterance_id] = unknown
        else:
            known.append(row)
    # A speaker is whole in one shard, but one of more hours than a shard has.
    cepstra = speaker_cepstra(known)
    found |= aligner.align(known, cepstra)
    aligned = {name: each for name, each in found.items() if isinstance(each, PhoneAlignment)}
    features = {name: tree_features(cepstra[name], aligner.lda_mllt) for name in aligned}
    statistics = triphone_statistics(features, aligned)
    tally = Tally.of(rows)
    outputs = (
        context.put_output(task.name, ".phones", encode_phones(found), tally),
        context.put_output(task.name, ".statistics", statistics.to_bytes(), Tally()),
    )
    record = Commit(
        task=task.name, fingerprint=context.fingerprint, outputs=outputs, tally_in=tally
    )
    return context.commit(record)


def _grown(
    context: StepContext, stored: Sequence[Output], phones: tuple[str, ...], config: TreeConfig
) -> Statistics:
    """Return the tree and its bound from the commit of the one task that grows it."""

    def parts() -> Iterator[TriphoneStatistics]:
        for _, part in prefetch(context.read, stored, READ_AHEAD):
            yield TriphoneStatistics.from_bytes(part)

    scratch, name = context.scratch, "tree"
    if (earlier := scratch.committed(name)) is not None:
        return earlier.statistics
    grown = grow_tree(reduce(add, parts()), phones, config)
    record = Commit(
        task=name,
        fingerprint=context.fingerprint,
        statistics={"senone_tree": grown.tree.to_json(), "senone_bound": grown.bound},
    )
    return scratch.commit(record).statistics


@once
def write_shard_senones(task: SenonesTask) -> Commit:
    """Write a shard's rows with the senones that the step's tree has for their phones."""
    context = task.context
    committed = context.scratch.committed("tree")
    assert committed is not None, "the tree is grown before its senones are written"
    tree = parse_senone_tree(committed.statistics["senone_tree"])
    rows = read_features(read_output(context.store, context.run_uri, task.features))
    senones = senones_of(decode_phones(context.read(task.phones)), tree)
    heard = heard_versions(rows, task.versions)
    return commit_aligned(context, task.name, rows, shared_by_versions(rows, heard, senones))


def senones_of(phones: Phones, tree: SenoneTree) -> dict[str, Senones | Unaligned]:
    """Return the tree's senone of every 10 ms frame, by utterance id."""
    return {
        name: each if isinstance(each, Unaligned) else senone_alignment(each, tree)
        for name, each in phones.items()
    }


def encode_phones(phones: Phones) -> bytes:
    """Write the phones of a shard's utterances: six bytes a segment."""
    aligned = {name: each for name, each in phones.items() if isinstance(each, PhoneAlignment)}
    unaligned = {name: each for name, each in phones.items() if isinstance(each, Unaligned)}
    nothing = np.zeros(0, np.int32)
    state = {
        "utterances": list(aligned),
        "num_frames": np.array([each.num_frames for each in aligned.values()], np.int64),
        "num_segments": np.array([len(each.phones) for each in aligned.values()], np.int64),
        "phones": np.concatenate([nothing, *(each.phones for each in aligned.values())]).astype(
            np.int16
        ),
        "starts": np.concatenate([nothing, *(each.starts for each in aligned.values())]),
        "unaligned": {name: [each.detail, each.reason] for name, each in unaligned.items()},
    }
    return encode_arrays(state)


def decode_phones(data: bytes) -> dict[str, PhoneAlignment | Unaligned]:
    """Read what `encode_phones` wrote."""
    state: dict[str, Any] = decode_arrays(data)
    ends = np.cumsum(state["num_segments"])
    parts = zip(
        state["utterances"],
        np.split(state["phones"].astype(np.int32), ends)[:-1],
        np.split(state["starts"], ends)[:-1],
        state["num_frames"].tolist(),
        strict=True,
    )
    aligned = {name: PhoneAlignment(phones, starts, size) for name, phones, starts, size in parts}
    return {**aligned, **{name: Unaligned(*each) for name, each in state["unaligned"].items()}}
