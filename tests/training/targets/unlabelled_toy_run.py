"""Write a toy run whose teacher is trained, with unlabelled sentences in three feature shards."""

from collections.abc import Sequence
from pathlib import Path

from infra.settings import canonical_json
from infra.store.object_store import ObjectStore
from pipeline.records import Tally
from pipeline.runs.commit import step_context
from pipeline.runs.manifest import Manifest, manifest_uri, read_manifest, read_output
from pipeline.runs.names import TEACHER, UNLABELLED, features_step
from pipeline.settings import TargetsConfig
from pipeline.shards import FeatureRow, PartitionRow, TargetRow, read_targets, write_features
from pipeline.steps.features import WITH_HYPOTHESES
from pipeline.steps.targets import generate_targets
from tests.in_process_teacher import in_process
from tests.small_corpus import serially
from tests.training.sequence_training.toy_run import finish, sentence_row, write_toy_run
from training.settings.models import LstmConfig
from training.targets.teacher import serve_teacher

K = 6
CONFIG = TargetsConfig(K, 60, 3)
BIDIRECTIONAL = LstmConfig(1, 12, bidirectional=True, look_ahead=0, dropout=0.0)
SHARDS = ((4, 0), (4, 1), (3, 2))
"""The sentences of each shard: how many, and from which of the toy run's on."""


def unlabelled_rows(shard: int) -> list[FeatureRow]:
    number, first = SHARDS[shard]
    sentences = [sentence_row(first + 10, row) for row in range(number)]
    names = [f"unlabelled-{shard}-{row}" for row in range(number)]
    return [feature_row(*each) for each in zip(names, sentences, strict=True)]


def feature_row(name: str, sentence: PartitionRow, text: str | None = None) -> FeatureRow:
    """The frames of a sentence as extraction stores them."""
    about = (name, "speaker", sentence.duration_ms, "2020-01-01", "a.wav", "etag")
    return FeatureRow(*about, text, None, sentence.features)


def write_transcribed(store: ObjectStore, run_uri: str, subset: str) -> None:
    """Write the features of six sentences with their transcripts, as those of a subset."""
    sentences = [sentence_row(20, number) for number in range(6)]
    rows = [feature_row(each.utterance_id, each, each.text) for each in sentences]
    step, tally = features_step(subset), Tally(len(rows), sum(row.duration_ms for row in rows))
    context = step_context(store, run_uri, step, {}, {})
    output = context.put_output("000000", ".parquet", write_features(rows), tally)
    finish(store, run_uri, step, tally, (output,))


def write_unlabelled_toy_run(
    folder: Path, shards: Sequence[Sequence[FeatureRow]] = ()
) -> tuple[ObjectStore, str, str]:
    """Write it, with other feature shards if some are given; return store, run and corpus."""
    store, run_uri, corpus_uri = write_toy_run(folder, TEACHER, BIDIRECTIONAL)
    step = features_step(UNLABELLED)
    moments = read_manifest(store, run_uri, step).statistics["moments"]
    Path(manifest_uri(run_uri, step)).unlink()
    context = step_context(store, run_uri, step, {}, {})
    outputs, heard = [], 0
    for shard, rows in enumerate(shards or map(unlabelled_rows, range(len(SHARDS)))):
        heard += sum(bool(row.hypotheses) for row in rows)
        tally = Tally(len(rows), sum(row.duration_ms for row in rows))
        outputs.append(context.put_output(f"{shard:06d}", ".parquet", write_features(rows), tally))
    total = sum((output.tally for output in outputs), Tally())
    stated = {WITH_HYPOTHESES: heard} if heard else {}
    finish(*(store, run_uri, step, total, tuple(outputs)), moments=moments, **stated)
    return store, run_uri, corpus_uri


def remove_targets(folder: Path) -> None:
    """Remove the run's targets, so that the step is fresh."""
    for path in sorted((folder / "run" / "targets").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def from_logits(folder: Path) -> Manifest:
    """Label into a fresh targets step, by the teacher's logits alone."""
    run_uri = str(folder / "run")
    remove_targets(folder)
    teacher = in_process(serve_teacher("cpu", run_uri, str(K), canonical_json(BIDIRECTIONAL)), K)
    store = ObjectStore((str(folder),))
    return generate_targets(store, run_uri, CONFIG, teacher, serially).manifest


def rows_of(folder: Path, manifest: Manifest) -> list[TargetRow]:
    """Return the targets of all shards, in order."""
    store, run_uri = ObjectStore((str(folder),)), str(folder / "run")
    shards = [read_targets(read_output(store, run_uri, each)) for each in manifest.outputs]
    return [row for shard in shards for row in shard]


def digests(manifest: Manifest) -> list[str]:
    """Return the digests of a step's outputs, in order."""
    return [output.sha256 for output in manifest.outputs]
