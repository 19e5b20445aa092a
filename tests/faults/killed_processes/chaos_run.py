"""Prepare the chaos test: a corpus of many small tasks, an undisturbed run, and comparisons."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from infra.settings import canonical_json
from infra.store.object_store import ObjectStore, join_uri
from pipeline.records import Tally
from pipeline.runs.commit import Commit
from pipeline.runs.engine import StepSpec, run_step
from pipeline.runs.manifest import Manifest, read_manifest, read_output
from pipeline.runs.names import SUBSETS, teachers
from pipeline.shards import read_features, read_partition, read_targets
from pipeline.steps.features import extract_features
from pipeline.steps.repartition import repartition
from pipeline.steps.selection.select import metadata_uri, select_utterances
from pipeline.steps.targets import generate_targets
from tests.in_process_teacher import in_process
from tests.small_corpus import flac, serially, tone
from tests.whole_path.manifests import manifest_bytes
from tests.whole_path.processes import TINY
from training.models.store import TrainedModel, make_model, store_model
from training.settings.recipe import Recipe, read_recipe
from training.targets.teacher import serve_teacher

STEPS = ("select_utterances", "extract_features", "generate_targets", "repartition")
MANIFESTS = (
    *(f"{step}/{subset}" for step in ("selection", "features") for subset in SUBSETS),
    *("targets/unlabelled", "partitions/unlabelled"),
)
NUM_SENONES = 60
NUM_BUCKETS = {"labelled": 2, "unlabelled": 24, "heldout": 2}
SPEAKERS_PER_BUCKET = 4
UTTERANCES_PER_SPEAKER = 6
# Each file has one or two speakers, so that there are many small tasks.
OVERRIDES = ("selection.file_hours=0.002", "selection.hours=0.13")


def chaos_recipe() -> Recipe:
    """Cut the tiny recipe into many tasks."""
    return read_recipe(str(TINY), OVERRIDES)


def write_chaos_corpus(store: ObjectStore, corpus_uri: str) -> None:
    """Write speech-like tones of 0.5 to 1.5 s into many buckets; a few objects are not audio."""
    for subset, num_buckets in NUM_BUCKETS.items():
        for bucket in range(num_buckets):
            records = []
            for number in range(SPEAKERS_PER_BUCKET * UTTERANCES_PER_SPEAKER):
                speaker, turn = divmod(number, UTTERANCES_PER_SPEAKER)
                name = f"{subset}-{bucket:02d}-{speaker:02d}-{turn:03d}"
                duration_s = 0.5 + (7 * bucket + number) % 11 / 10
                broken = subset == "unlabelled" and (bucket, number) in ((3, 5), (11, 17))
                samples = tone(bucket + number, duration_s)
                uri = f"audio/{bucket:02d}/{name}.flac"
                store.put(join_uri(corpus_uri, uri), b"no audio" if broken else flac(samples))
                records.append(
                    {
                        "utterance_id": name,
                        "speaker_id": f"{subset}-{bucket:02d}-{speaker:02d}",
                        "duration_s": duration_s,
                        "created_at": f"2026-01-{bucket + 1:02d}T00:{number:02d}:00+00:00",
                        "locale": "en-US",
                        "audio_uri": uri,
                    }
                )
            folder = f"metadata/{subset}/date=2026-01-01/speaker_bucket={bucket:02d}"
            lines = "".join(json.dumps(record) + "\n" for record in records)
            store.put(join_uri(corpus_uri, folder, "part-00000.jsonl"), lines.encode())


def store_random_teacher(store: ObjectStore, run_uri: str) -> None:
    """Store an untrained teacher; it labels as any other does."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = make_model(chaos_recipe().models.teacher, NUM_SENONES)
    trained = TrainedModel(model.eval(), torch.zeros(NUM_SENONES))
    spec = StepSpec(store, run_uri, "models/teacher", {})
    run_step(spec, lambda step: store_model(step, trained, Tally(), {}, Tally()))


def run_plainly(
    step: str, store: ObjectStore, run_uri: str, corpus_uri: str, recipe: Recipe
) -> None:
    """Run one of the four steps in this process as a plain loop, without Spark."""
    budget = recipe.loss_budget
    if step == "select_utterances":
        for subset in SUBSETS:
            uri = metadata_uri(corpus_uri, subset)
            select_utterances(store, run_uri, subset, uri, recipe.selection, budget, serially)
    elif step == "extract_features":
        for subset in SUBSETS:
            extract_features(store, run_uri, subset, corpus_uri, recipe.features, budget, serially)
    elif step == "generate_targets":
        k, form = recipe.targets.k, canonical_json(recipe.models.teacher)
        names = teachers(recipe.teacher.ensemble)
        teacher = in_process(serve_teacher("cpu", run_uri, str(k), form, ",".join(names)), k)
        generate_targets(store, run_uri, recipe.targets, teacher, serially, names)
    else:
        repartition(store, run_uri, recipe.partitions, serially)


@dataclass(frozen=True)
class Undisturbed:
    """Undisturbed holds the manifests that every other run must equal, and the shared corpus."""

    corpus_uri: str
    manifests: dict[str, bytes]

    @classmethod
    def make(cls, folder: Path) -> "Undisturbed":
        """Write corpus and teacher below `folder`, and run the four steps there."""
        run_uri, corpus_uri = str(folder / "run"), str(folder / "corpus")
        store = ObjectStore((run_uri, corpus_uri))
        write_chaos_corpus(store, corpus_uri)
        store_random_teacher(store, run_uri)
        for step in STEPS:
            run_plainly(step, store, run_uri, corpus_uri, chaos_recipe())
        return cls(corpus_uri, manifest_bytes(store, run_uri))

    def differences(self, store: ObjectStore, run_uri: str) -> list[str]:
        """List the manifests of another run that are not byte-identical to these."""
        found = manifest_bytes(store, run_uri)
        names = sorted(self.manifests.keys() | found.keys())
        return [name for name in names if found.get(name) != self.manifests.get(name)]


def require_books(store: ObjectStore, run_uri: str) -> None:
    """Require every byte as its manifest says, one commit per task, and every utterance once."""
    manifests = {step: read_manifest(store, run_uri, step) for step in MANIFESTS}
    for step, manifest in manifests.items():
        _require_digests(store, run_uri, manifest)
        _require_commits(store, run_uri, step, manifest)
    features, targets, partitions = (
        _utterances(store, run_uri, manifests[f"{step}/unlabelled"], read)
        for step, read in (
            ("features", read_features),
            ("targets", read_targets),
            ("partitions", read_partition),
        )
    )
    assert set(features.values()) == {1}, "an utterance is doubled"
    assert features == targets == partitions, "an utterance is lost or doubled"
    extracted = manifests["features/unlabelled"]
    assert extracted.tally_in == manifests["selection/unlabelled"].tally_out
    assert features.total() == extracted.tally_out.utterances
    assert extracted.quarantined.utterances > 0, "the ledger was not put to the test"


def _require_digests(store: ObjectStore, run_uri: str, manifest: Manifest) -> None:
    for output in (*manifest.outputs, *manifest.ledgers):
        assert len(read_output(store, run_uri, output)) == output.num_bytes, output.key
    held = sum((output.tally for output in manifest.outputs), Tally())
    assert held == manifest.tally_out, manifest.step
    kept = manifest.tally_out + manifest.quarantined + manifest.unselected
    assert kept == manifest.tally_in, manifest.step


def _require_commits(store: ObjectStore, run_uri: str, step: str, manifest: Manifest) -> None:
    found = store.list(join_uri(run_uri, step, "commits"))
    commits = [Commit.from_bytes(store.get(each.uri)) for each in found]
    assert len({commit.task for commit in commits}) == len(commits), step
    named = sorted(output.key for commit in commits for output in commit.outputs)
    assert named == sorted(output.key for output in manifest.outputs), step


def _utterances(store, run_uri: str, manifest: Manifest, read) -> Counter:
    return Counter(
        row.utterance_id
        for output in manifest.outputs
        for row in read(read_output(store, run_uri, output))
    )
