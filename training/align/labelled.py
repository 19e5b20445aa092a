"""The labelled subset as training reads it: transcripts, lexicon, hard-target shards."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt16

from infra.store.object_store import ObjectStore, join_uri, scan_checked
from pipeline.records import Quarantined, Tally, source_id
from pipeline.runs.commit import Commit, StepContext
from pipeline.runs.engine import Statistics
from pipeline.runs.manifest import is_finished, read_manifest
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    BOOTSTRAP_STEP,
    INGEST_STEP,
    LEXICON_FILE,
    PLACEMENTS_SETTING,
    UNKNOWN_WORDS_SETTING,
)
from pipeline.shards import (
    Alignment,
    FeatureRow,
    PartitionRow,
    read_partition_transcripts,
    write_partition,
)
from training.decode.corpus_lexicon import CorpusLexicon
from training.decode.lexicon import Lexicon
from training.decode.senones import SenoneTree, Unaligned, parse_senone_tree

MADE_STATISTIC = "made_pronunciations"
"""The bootstrap's statistic of the phones, by word, that letters made."""

Senones = UInt16[np.ndarray, " _frames"]
Alignments = Mapping[str, Senones | Unaligned]
"""By utterance id the senone of every 10 ms frame, or why there is none."""


def read_tree(store: ObjectStore, run_uri: str, step: str = ALIGNMENT_STEP) -> SenoneTree:
    """Read the tree of the senones that an alignment has: all models but the aligner know these."""
    return parse_senone_tree(read_manifest(store, run_uri, step).statistic("senone_tree", str))


def read_lexicon(
    store: ObjectStore, run_uri: str, corpus_uri: str, reads: Sequence[str]
) -> CorpusLexicon:
    """Read the corpus's lexicon for a step that reads the manifests of the steps `reads`.

    Unknown words are those that the bootstrap aligned so, with the pronunciations that it made.
    ValueError if it or another of the steps is unfinished, or was made with other pronunciations.
    """
    steps = dict.fromkeys((*reads, BOOTSTRAP_STEP))
    manifests = {step: read_manifest(store, run_uri, step) for step in steps}
    uri = join_uri(corpus_uri, LEXICON_FILE)
    bootstrap = manifests[BOOTSTRAP_STEP]
    rule, made = bootstrap.config[UNKNOWN_WORDS_SETTING], bootstrap.statistics.get(MADE_STATISTIC)
    lexicon = CorpusLexicon.read(store, corpus_uri, rule, made or {})
    for manifest in manifests.values():
        used = manifest.inputs.get(LEXICON_FILE)
        if used not in (None, lexicon.digests[LEXICON_FILE]):
            raise ValueError(
                f"{uri} is not the lexicon that made {manifest.step} (SHA-256 {used[:12]}, now "
                f"{lexicon.digests[LEXICON_FILE][:12]}): put it back, or use another --run"
            )
    return lexicon


def unknown_words_of(row: FeatureRow, lexicon: Lexicon) -> Unaligned | None:
    """Return why an utterance cannot be aligned by the lexicon; None if it has all words."""
    unknown = lexicon.unaligned(row.words)
    if not unknown:
        return None
    return Unaligned(f"not in {LEXICON_FILE}: {', '.join(map(repr, unknown))}", "unknown_word")


def commit_aligned(
    context: StepContext, name: str, rows: Sequence[FeatureRow], alignments: Alignments
) -> Commit:
    """Write a shard's rows with their senones as one training partition, and commit it.

    An utterance without alignment becomes a ledger row, so that the tallies balance.
    """
    aligned: list[PartitionRow] = []
    failed: list[Quarantined] = []
    counts: Counter[int] = Counter()
    for row in rows:
        found = alignments[row.utterance_id]
        if isinstance(found, Unaligned):
            failed.append(Quarantined.of(row, found.reason, found.detail))
            continue
        aligned.append(
            PartitionRow(
                utterance_id=row.utterance_id,
                speaker_id=row.speaker_id,
                duration_ms=row.duration_ms,
                text=row.text,
                features=row.features,
                targets=Alignment(found),
                offset=0,
                placement=row.placement,
            )
        )
        counts.update(found.tolist())
    tally = Tally.of(aligned)
    outputs = (
        (context.put_output(name, ".parquet", write_partition(aligned), tally),) if aligned else ()
    )
    record = Commit(
        task=name,
        fingerprint=context.fingerprint,
        outputs=outputs,
        ledger=context.put_ledger(name, failed),
        tally_in=tally + Tally.of(failed),
        quarantined=Tally.of(failed),
        statistics={"senones": [list(each) for each in sorted(counts.items())]},
    )
    return context.commit(record)


def senone_statistics(tree: SenoneTree, sums: Statistics) -> dict[str, Any]:
    """Return the senones' frames of all shards, beside the tree that names the senones."""
    counts = np.zeros(tree.num_senones, np.int64)
    for senone, count in sums["senones"]:
        counts[senone] = count
    return {
        "num_senones": tree.num_senones,
        "senone_tree": tree.to_json(),
        "senone_counts": counts.tolist(),
    }


def sum_histograms(tasks: Sequence[Statistics]) -> Statistics:
    """Add up the senones' frames of tasks, or of tasks that were added up before."""
    counts: Counter[int] = Counter()
    for statistics in tasks:
        for senone, count in statistics["senones"]:
            counts[senone] += count
    return {"senones": [list(each) for each in sorted(counts.items())]}


def labelled_transcripts(store: ObjectStore, run_uri: str) -> list[list[str]]:
    """Read the words of the labelled utterances that were aligned, without features.

    An utterance that ingest stored in several placements counts once: in five copies no n-gram
    occurs once, smoothing leaves unseen ones too little, and a trigram's perplexity rose from 33
    to 67.
    """
    placements = _simulated_placements(store, run_uri)
    texts: dict[str, str] = {}
    for output in read_manifest(store, run_uri, ALIGNMENT_STEP).outputs:
        uri = output.uri(run_uri)
        for utterance_id, text in scan_checked(store, uri, read_partition_transcripts):
            texts.setdefault(source_id(utterance_id, placements), text)
    return [text.split() for text in texts.values()]


def transcript_reads(store: ObjectStore, run_uri: str) -> list[str]:
    """Name the step besides alignment that decides the transcripts: ingest, if it simulated."""
    return [INGEST_STEP] if _simulated_placements(store, run_uri) else []


def _simulated_placements(store: ObjectStore, run_uri: str) -> tuple[str, ...]:
    """Return the placements that ingest may have given to labelled utterances, if any."""
    if not is_finished(store, run_uri, INGEST_STEP):
        return ()
    simulated = read_manifest(store, run_uri, INGEST_STEP).config.get(PLACEMENTS_SETTING)
    return tuple(simulated["training"]["placements"]) if simulated else ()
