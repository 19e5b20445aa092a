"""The labelled transcripts that language models count: each utterance once."""

from infra.store.checked_reads import scan_checked
from infra.store.object_store import ObjectStore, join_uri
from pipeline.records import source_id
from pipeline.runs.manifest import is_finished, read_manifest
from pipeline.runs.names import ALIGNMENT_STEP, INGEST_STEP, PLACEMENTS_SETTING
from pipeline.shards import read_partition_transcripts


def labelled_transcripts(store: ObjectStore, run_uri: str) -> list[list[str]]:
    """Read the words of the labelled utterances that alignment could use, without features.

    An utterance that ingest stored in several placements counts once: in five copies no n-gram
    occurs once, smoothing leaves unseen ones too little, and a trigram's perplexity rose from 33
    to 67.
    """
    placements = _simulated_placements(store, run_uri)
    texts: dict[str, str] = {}
    for output in read_manifest(store, run_uri, ALIGNMENT_STEP).outputs:
        uri = join_uri(run_uri, output.key)
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
