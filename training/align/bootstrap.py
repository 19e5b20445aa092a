"""Bootstrap the alignment: monophones on a share of the labelled data, and the tree."""

import heapq
import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from infra.log_lines import log
from infra.prefetch import prefetch
from infra.store.object_store import ObjectStore, scan_checked
from pipeline.placement_versions import distinct, heard_versions, shared_by_versions
from pipeline.records import Tally
from pipeline.runs.commit import Commit, StepContext
from pipeline.runs.engine import (
    Statistics,
    StepResult,
    StepRun,
    StepSpec,
    TaskPlan,
    run_step,
    run_tasks,
)
from pipeline.runs.manifest import Manifest, Output, read_manifest, read_output
from pipeline.runs.names import BOOTSTRAP_STEP, LABELLED, features_step, task_name
from pipeline.sampling import sampling_priority
from pipeline.settings import Versions
from pipeline.shards import FeatureRow, read_feature_texts, read_features
from training.align.labelled import (
    Alignments,
    Senones,
    commit_aligned,
    senone_statistics,
    sum_histograms,
    transcribed,
    unknown_words_of,
)
from training.align.monophone_hmm import bootstrap_alignment, speaker_cepstra
from training.align.tree_growing import GrownTree, grow_tree
from training.decode.corpus_lexicon import CorpusLexicon, UnknownWords
from training.decode.lexicon import Lexicon
from training.decode.senones import Unaligned, senone_alignment
from training.settings.decoding import (
    BootstrapConfig,
    TreeConfig,
    UnknownWordsRule,
    bootstrap_settings,
)

READ_AHEAD = 2
"""Shards in memory while one is drawn from, of some 0.25 GB at five hours."""

MS_PER_HOUR = 3_600_000
_SEED = 17


@dataclass(slots=True)
class ShardSample:
    """ShardSample holds the rows of a shard that were drawn, and the tally of the others."""

    rows: list[FeatureRow] = field(default_factory=list)
    unselected: Tally = field(default_factory=Tally)


def bootstrap(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    config: BootstrapConfig,
    tree_config: TreeConfig,
    loss_budget: float,
    versions: Versions = "own",
    unknown_words: UnknownWordsRule = "row",
) -> StepResult:
    """Align by monophones, grow a senone tree on that, and write the senone of every frame.

    Of more than `max_hours` the first network sees a share alone; it then realigns all. With
    `versions` "clearest", the versions of an utterance have the alignment of the clearest one.
    With `unknown_words` "row", utterances with a word without pronunciation have no alignment.
    LossBudgetExceededError if too many of all labelled utterances have one, drawn or not.
    """
    features = features_step(LABELLED)
    read_manifest(store, run_uri, features)  # what is missing first is named first
    stored = CorpusLexicon.read(store, corpus_uri, unknown_words)

    def align_monophones(step: StepRun) -> Manifest:
        context = step.context
        lexicon = stored.parse()
        check_transcripts(store, run_uri, LABELLED, lexicon, loss_budget)
        samples = _draw(context, config.max_hours)
        rows = [row for sample in samples.values() for row in sample.rows]
        senones, grown = align_rows(rows, lexicon, config, tree_config, versions)

        def write_shard(name: str) -> Commit:
            if (earlier := context.committed(name)) is not None:
                return earlier
            sample = samples[name]
            return commit_aligned(context, name, sample.rows, senones, sample.unselected)

        def statistics(sums: Statistics) -> Statistics:
            return {**senone_statistics(grown.tree, sums), "senone_bound": grown.bound}

        plan = TaskPlan(
            {name: name for name in samples},
            write_shard,
            one_after_another,
            loss_budget,
            fold=sum_histograms,
            statistics=statistics,
            num_utterances=len(rows),
        )
        return run_tasks(step, plan)

    resolved = bootstrap_settings(config, tree_config, versions, unknown_words)
    spec = StepSpec(store, run_uri, BOOTSTRAP_STEP, resolved, [features], stored.digests)
    return run_step(spec, align_monophones)


def check_transcripts(
    store: ObjectStore, run_uri: str, subset: str, lexicon: Lexicon, loss_budget: float
) -> None:
    """Log which words of a subset's transcripts the lexicon lacks; reads no features.

    LossBudgetExceededError if too many utterances cannot be aligned for them.
    """
    outputs = read_manifest(store, run_uri, features_step(subset)).outputs
    uris = (output.uri(run_uri) for output in outputs)
    texts = chain.from_iterable(scan_checked(store, uri, read_feature_texts) for uri in uris)
    unknown = UnknownWords.of(texts, lexicon)
    unknown.check_loss(lexicon, subset, loss_budget)
    if said := unknown.note(lexicon, subset):
        log(said)


def _draw(context: StepContext, max_hours: float) -> dict[str, ShardSample]:
    def read(output: Output) -> list[FeatureRow]:
        return read_features(read_output(context.store, context.run_uri, output))

    outputs = read_manifest(context.store, context.run_uri, features_step(LABELLED)).outputs
    shards = enumerate(prefetch(read, outputs, READ_AHEAD))
    samples = draw_rows(((task_name(number), rows) for number, (_, rows) in shards), max_hours)
    if not any(sample.rows for sample in samples.values()):
        raise ValueError(
            f"bootstrap.max_hours = {max_hours:g}: need more: the utterance that comes "
            "first in the draw is longer"
        )
    return samples


def align_rows(
    rows: Sequence[FeatureRow],
    lexicon: Lexicon,
    config: BootstrapConfig,
    tree_config: TreeConfig,
    versions: Versions = "own",
) -> tuple[Alignments, GrownTree]:
    """Align by monophones, and grow the senone tree on their segments."""
    unknown = {row.utterance_id: found for row in rows if (found := unknown_words_of(row, lexicon))}
    rows = [row for row in rows if row.utterance_id not in unknown]
    heard = heard_versions(rows, versions)
    utterances = [transcribed(row) for row in distinct(heard)]
    # 003 VII-C2 starts from an alignment model at hand; monophones need none.
    bootstrapped = bootstrap_alignment(utterances, lexicon, config)
    phones = bootstrapped.alignments
    # 003 VII-C1 grows its tree on LDA and MLLT of PLP; cepstra with deltas replace them.
    grown = grow_tree(speaker_cepstra(utterances), phones, lexicon.phones, tree_config)
    senones: dict[str, Senones | Unaligned] = {
        name: Unaligned(detail) for name, detail in bootstrapped.failures.items()
    }
    senones |= {name: senone_alignment(each, grown.tree) for name, each in phones.items()}
    return {**unknown, **shared_by_versions(rows, heard, senones)}, grown


def one_after_another(elements: Any, function: Any, description: str) -> list[Any]:  # noqa: ANN401
    """Run the tasks in this process: they write the alignments that it holds."""
    del description
    return [function(element) for element in elements]


def draw_rows(
    shards: Iterable[tuple[str, list[FeatureRow]]], max_hours: float
) -> dict[str, ShardSample]:
    """Draw at most `max_hours` (0: all) evenly from the speakers; only these remain in memory.

    Utterances are taken in the order of their places, whatever the order of the shards, until the
    next one would exceed the hours.
    """
    limit_ms = max_hours * MS_PER_HOUR or math.inf
    samples: dict[str, ShardSample] = {}
    drawn: list[_Drawn] = []
    total_ms, end = 0, (-sys.maxsize, 0)
    for name, rows in shards:
        samples[name] = ShardSample()
        for number, (row, (rank, priority)) in enumerate(zip(rows, draw_places(rows), strict=True)):
            if (-rank, -priority) <= end:
                samples[name].unselected += Tally(1, row.duration_ms)
                continue
            # Features are views of their shard, which one drawn row would keep in memory.
            own = replace(row, features=row.features.copy())
            heapq.heappush(drawn, _Drawn((-rank, -priority), name, number, own))
            total_ms += row.duration_ms
            # The last of the draw goes first, and with it all that would come after it.
            while total_ms > limit_ms:
                last = heapq.heappop(drawn)
                samples[last.shard].unselected += Tally(1, last.row.duration_ms)
                total_ms -= last.row.duration_ms
                end = last.key
    for each in sorted(drawn, key=lambda each: each.number):
        samples[each.shard].rows.append(each.row)
    return samples


@dataclass(order=True, frozen=True, slots=True)
class _Drawn:
    """_Drawn is a row that has been drawn; a heap has the one of the last place on top."""

    key: tuple[int, int]
    shard: str = field(compare=False)
    number: int = field(compare=False)
    row: FeatureRow = field(compare=False)


def draw_places(rows: Sequence[FeatureRow]) -> list[tuple[int, int]]:
    """Return each utterance's place in the draw: its rank among its speaker's, and its hash.

    A speaker lies whole in one shard, so every speaker gives one utterance before any gives two.
    """
    hashes = [sampling_priority(_SEED, row.utterance_id) for row in rows]
    ranks, num_seen = [0] * len(rows), Counter[str]()
    for index in sorted(range(len(rows)), key=hashes.__getitem__):
        ranks[index] = num_seen[rows[index].speaker_id]
        num_seen[rows[index].speaker_id] += 1
    return list(zip(ranks, hashes, strict=True))
