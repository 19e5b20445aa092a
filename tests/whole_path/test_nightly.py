"""Two nights in S3: manifests of audio that stays where it is, and a run that extends the first."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
import soundfile

from infra.store.object_store import ObjectStore
from jobs.run import launches
from pipeline.records import Tally
from pipeline.runs.manifest import read_manifest
from pipeline.runs.names import LABELLED, PARTITIONS_STEP, UNLABELLED, features_step, selection_step
from tests.infra.aws.role_policy import PLACES, allows, requests_by_step, role_of
from tests.s3_server import CREDENTIALS, fresh_bucket, running_s3_server
from tests.whole_path.manifests import require_balance
from tests.whole_path.processes import Environment, run_steps
from tests.whole_path.reduced_an4 import read_table, write_reduced_an4

pytestmark = [pytest.mark.timeout(2400), pytest.mark.chaos]

STEPS = [launch.step for launch in launches(["--kaldi-dir", ""], 1, 1)]
SECOND_NIGHT = STEPS[: STEPS.index("train_student")]
"""The second night ends with its training partitions; the student is the first night's matter."""

SUBSETS = (LABELLED, UNLABELLED, "heldout")
CUT_SHORT = 1
"""Utterances whose file of the reduced corpus is cut short, in the second night."""


@dataclass(frozen=True)
class Nights:
    """Nights holds a bucket of audio and manifests, both nights' runs in it, and its requests."""

    bucket: str
    num_utterances: Mapping[str, int]
    requests: str

    @property
    def store(self) -> ObjectStore:
        return ObjectStore((f"s3://{self.bucket}",))

    def run_uri(self, night: int) -> str:
        return f"s3://{self.bucket}/runs/night-{night}"


def put_corpus(kaldi_dir: Path, bucket: str) -> dict[str, int]:
    """Put audio and NeMo manifests, 20 unlabelled utterances in the first night's; count rows."""
    client = boto3.client("s3")
    tables = {name: read_table(kaldi_dir / name) for name in ("wav.scp", "text", "utt2spk")}
    rows: dict[str, list[dict[str, Any]]] = {subset: [] for subset in SUBSETS}
    for subset in SUBSETS:
        speakers = (kaldi_dir / f"{subset}.speakers").read_text().split()
        for key, speaker in tables["utt2spk"].items():
            if speaker in speakers:
                path = kaldi_dir / tables["wav.scp"][key]
                client.upload_file(str(path), bucket, f"audio/{key}.flac")
                uri, duration_s = f"s3://{bucket}/audio/{key}.flac", soundfile.info(path).duration
                row = {"audio_filepath": uri, "duration": duration_s, "speaker": speaker, "id": key}
                rows[subset].append(row | {"text": tables["text"][key]})
    rows["second"] = rows[UNLABELLED][20:]
    rows[UNLABELLED] = rows[UNLABELLED][:20]
    for name, listed in rows.items():
        lines = "".join(f"{json.dumps(row)}\n" for row in listed)
        client.put_object(Bucket=bucket, Key=f"manifests/{name}.jsonl", Body=lines.encode())
    client.upload_file(str(kaldi_dir / "lexicon.txt"), bucket, "manifests/lexicon.txt")
    return {name: len(listed) for name, listed in rows.items()}


def run_night(bucket: str, night: int, environment: Environment, options: Sequence[str]) -> None:
    """Run the command that the guide on increments gives."""
    settings = [
        f"corpus.uri=s3://{bucket}/corpus",
        f'corpus.audio_prefixes=["s3://{bucket}/audio"]',
        "loss_budget=0.2",  # one file of ten is cut short
    ]
    ranks = ("--supervised-ranks", "1", "--student-ranks", "2")
    given = [part for each in settings for part in ("--set", each)]
    run_steps(f"s3://{bucket}/runs/night-{night}", environment, *ranks, *given, *options)


@pytest.fixture(scope="module")
def nights(
    an4_dir: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Nights]:
    """Run both nights by the command alone, on Spark."""
    folder = tmp_path_factory.mktemp("nights")
    kaldi_dir, log = write_reduced_an4(an4_dir, folder / "kaldi"), folder / "requests.log"
    with running_s3_server(log) as endpoint, pytest.MonkeyPatch.context() as patch:
        bucket = fresh_bucket(endpoint, patch)
        counted = put_corpus(kaldi_dir, bucket)
        inherited = {**environment, **CREDENTIALS, "AWS_ENDPOINT_URL": endpoint}
        manifests = f"s3://{bucket}/manifests"
        first = [f"{subset}={manifests}/{subset}.jsonl" for subset in SUBSETS]
        given = [part for each in first for part in ("--manifest", each)]
        run_night(bucket, 1, inherited, [*given, "--lexicon", f"{manifests}/lexicon.txt"])
        extends = ["--extends", f"s3://{bucket}/runs/night-1"]
        only = [part for step in SECOND_NIGHT for part in ("--only", step)]
        second = ["--manifest", f"{manifests}/second.jsonl", *extends, *only]
        run_night(bucket, 2, inherited, second)
        yield Nights(bucket, counted, log.read_text())


def test_audio_is_read_where_it_is(nights: Nights) -> None:
    """The corpus is metadata and a lexicon: one record for each line of the manifests."""
    corpus = f"s3://{nights.bucket}/corpus/"
    folders = {found.uri.removeprefix(corpus).split("/")[0] for found in nights.store.list(corpus)}
    assert folders == {"metadata", "lexicon.txt"}
    require_balance(nights.store, nights.run_uri(1), SUBSETS)
    for subset in SUBSETS:
        selected = read_manifest(nights.store, nights.run_uri(1), selection_step(subset))
        assert selected.tally_in.utterances == nights.num_utterances[subset]


def test_the_second_night_is_a_union(nights: Nights) -> None:
    """It extracts and labels its own utterances alone, and its manifests hold both nights'."""
    first, second = (
        read_manifest(nights.store, nights.run_uri(night), features_step(UNLABELLED))
        for night in (1, 2)
    )
    new = nights.num_utterances["second"]
    assert second.tally_in.utterances == first.tally_in.utterances + new
    assert second.quarantined.utterances == first.quarantined.utterances + CUT_SHORT
    own = sum((each.tally for each in second.outputs if not each.run), Tally())
    assert own.utterances == new - CUT_SHORT
    assert {each.run for each in second.outputs} == {"", nights.run_uri(1)}
    partitions = read_manifest(nights.store, nights.run_uri(2), PARTITIONS_STEP)
    assert partitions.tally_out == second.tally_out


def test_roles_allow_both_nights(nights: Nights) -> None:
    """Of runs in one folder each step reads what its role permits; audio elsewhere is named to it.

    The first step's requests have those of the command among them, and of the manifests.
    """
    bucket = {"Bucket": nights.bucket, "CorpusBucket": nights.bucket, "CorpusPrefix": "corpus"}
    places = {**PLACES, **bucket, "RunPrefix": "runs/*"}
    audio = f"arn:aws:s3:::{nights.bucket}/audio/"
    for night, steps in ((1, STEPS), (2, SECOND_NIGHT)):
        by_step = requests_by_step(nights.requests, f"{nights.bucket}/runs/night-{night}")
        assert list(by_step) == steps
        for step in steps[1:]:
            role = role_of(step, places)
            denied = {each.resource for each in by_step[step] if not allows(role, each)}
            assert step == "extract_features" or not denied, step
            assert all(each.startswith(audio) for each in denied), denied
