"""Make a small run of the pipeline's four steps with a bit of everything, within a second."""

import json
import shutil
from pathlib import Path

from infra.store.object_store import ObjectStore, join_uri
from pipeline.runs.manifest import Output, read_manifest, read_output
from pipeline.settings import ExtractionConfig, RepartitionConfig, SelectionConfig
from pipeline.steps.features import extract_features
from pipeline.steps.repartition import repartition
from pipeline.steps.selection.select import metadata_uri, select_utterances
from pipeline.steps.targets import generate_targets
from tests.four_steps import put_teacher, teacher
from tests.small_corpus import local_store, serially, write_corpus, write_metadata
from training.settings.decoding import LabellingConfig

SUBSET = "unlabelled"
SETTINGS = (
    *(f"selection.{each}" for each in (f"hours={20 / 3600}", f"file_hours={5 / 3600}", "seed=3")),
    *(f"features.{each}" for each in ("gets_in_flight=4", "seed=3")),
    *(f"targets.{each}" for each in ("k=4", "request_frames=100", "seed=3")),
    *(f"partitions.{each}" for each in (f"partition_hours={5 / 3600}", "seed=3")),
)
"""Settings by which --set adapts the tiny recipe to this run."""

SEED = 3
BAD_AUDIO = "audio that is none"
BAD_METADATA = "too-short"


def make_run(folder: Path) -> tuple[ObjectStore, str]:
    """Make thirty utterances and a bad record; two thirds are selected, one has bad audio."""
    store, run_uri, corpus_uri = local_store(folder)
    records = write_corpus(store, corpus_uri, SUBSET, num_speakers=6, num_each=5)
    bad = {**records[0], "utterance_id": BAD_METADATA, "duration_s": 0}
    write_metadata(store, corpus_uri, SUBSET, [*records, bad])
    selection = SelectionConfig(hours=20 / 3600, file_hours=5 / 3600, seed=SEED)
    source = metadata_uri(corpus_uri, SUBSET)
    select_utterances(store, run_uri, SUBSET, source, selection, 0.5, serially)
    store.put(join_uri(corpus_uri, f"audio/{spoilt(store, run_uri)}.flac"), BAD_AUDIO.encode())
    extraction = ExtractionConfig(gets_in_flight=4, seed=SEED)
    extract_features(store, run_uri, SUBSET, corpus_uri, extraction, 0.5, serially)
    put_teacher(store, run_uri)
    generate_targets(store, run_uri, LabellingConfig(4, 100, SEED), teacher, serially)
    repartition(store, run_uri, RepartitionConfig(5 / 3600, 2, SEED), serially)
    return store, run_uri


def copy_run(run_uri: str, folder: Path) -> tuple[ObjectStore, str]:
    """Copy the run elsewhere."""
    shutil.copytree(run_uri, folder / "run")
    store, copied, _ = local_store(folder)
    return store, copied


def upload_run(local_uri: str, uri: str) -> None:
    """Copy a run to a URI in S3."""
    store = ObjectStore((uri,))
    for path in Path(local_uri).rglob("*.*"):
        store.put(f"{uri}/{path.relative_to(local_uri).as_posix()}", path.read_bytes())


def outputs(store: ObjectStore, run_uri: str, step: str) -> tuple[Output, ...]:
    """Return a step's objects."""
    return read_manifest(store, run_uri, f"{step}/{SUBSET}").outputs


def selected_ids(store: ObjectStore, run_uri: str) -> list[str]:
    """Return the selected utterances, file by file."""
    return [
        json.loads(line)["utterance_id"]
        for output in outputs(store, run_uri, "selection")
        for line in read_output(store, run_uri, output).splitlines()
    ]


def spoilt(store: ObjectStore, run_uri: str) -> str:
    """Return the selected utterance whose audio is bad."""
    return selected_ids(store, run_uri)[1]
