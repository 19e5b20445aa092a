"""Compare all that two commits write: `python -m tests.same_bytes BASE [OTHER] [--only PART]`.

Each commit runs in a checkout of its own, by the interpreter that runs this program:

- `local`: the tiny recipe from a synthetic corpus to the report, on four student ranks;
- `s3`: the same in an S3 server;
- `ranks`: the student of the local run again, by each trainer in turn, on four ranks;
- `trajectories`: each trainer, 30 steps on four simulated ranks.

Objects are compared by their SHA-256. Records of seconds and the page that shows them are left out;
`report.json` is compared without them. Exit codes: 0 if all is equal, 1 if not.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import boto3

from tests.s3_server import CREDENTIALS, running_s3_server

REPOSITORY = Path(__file__).parents[1]
RECIPE = "tests/whole_path/tiny.toml"
CORPUS = (
    *("--labelled-hours", "0.02", "--num-labelled-speakers", "2"),
    *("--unlabelled-hours", "0.04", "--num-unlabelled-speakers", "4"),
    *("--heldout-utterances-per-placement", "2", "--num-heldout-speakers", "2"),
)
TRAINERS = (
    *("synchronous", "gtc", "bmuf", "htm", "one_bit", "sparse_loco"),
    *("d_psgd", "rand_psgd", "d1d_psgd"),
)
"""All trainers but ad_psgd, which is asynchronous."""

TIMED_FOLDERS = ("steps/", "plan/")
TIMED_OBJECTS = ("report/manifest.json", "report/report.html")
TIMED_KEYS = (
    *("seconds", "pace", "origin", "plan", "requests", "started_at", "ended_at"),
    *("inputs", "objects", "sha256"),  # digests of the jobs' records, of the page and of all
)

S3_RUN = "s3://megahour/run"

Digests = dict[str, str]
Environment = Mapping[str, str]


def main() -> int:
    """Run both commits, one after the other; print what differs."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.same_bytes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("other", nargs="?", default="HEAD", help="the changed one; default HEAD")
    parser.add_argument("--only", action="append", choices=PARTS, help="repeat it for more")
    arguments = parser.parse_args()
    parts = [name for name in PARTS if not arguments.only or name in arguments.only]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as checkouts:
        trees = [
            checkouts.enter_context(checkout(commit, Path(folder) / name))
            for name, commit in (("base", arguments.base), ("other", arguments.other))
        ]
        base, other = (written_by(tree, Path(folder) / "work", parts) for tree in trees)
    return compare(base, other)


@contextmanager
def checkout(commit: str, tree: Path) -> Iterator[Path]:
    """Check a commit out beside the repository, with the C libraries that are built here."""
    git = ("git", "-C", str(REPOSITORY), "worktree")
    subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
    try:
        yield tree
    finally:
        subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def written_by(tree: Path, work: Path, parts: Sequence[str]) -> Digests:
    """Run the parts in a checkout; return the digest of each object that they write.

    Both commits write into one folder, whose path some objects hold.
    """
    work.mkdir()
    found = {
        f"{name}/{key}": digest for name in parts for key, digest in PARTS[name](tree, work).items()
    }
    shutil.rmtree(work)
    return found


def local(tree: Path, work: Path) -> Digests:
    """Run every step on local paths."""
    synthesize(tree, work)
    whole_run(tree, work, str(work / "run"), os.environ)
    return {**digests_of(work / "kaldi", "kaldi/"), **digests_of(work / "run", "run/")}


def s3(tree: Path, work: Path) -> Digests:
    """Run every step in an S3 server."""
    if not (work / "kaldi").exists():
        synthesize(tree, work)
    with bucket() as (environment, objects):
        whole_run(tree, work, S3_RUN, environment)
        return {
            f"run/{key}": digest(data, key) for key, data in objects().items() if is_compared(key)
        }


@contextmanager
def bucket() -> Iterator[tuple[Environment, Callable[[], dict[str, bytes]]]]:
    """Start an S3 server with a bucket; yield what finds it, and a function that reads S3_RUN."""
    with running_s3_server() as endpoint:
        environment = {**os.environ, **CREDENTIALS, "AWS_ENDPOINT_URL": endpoint}
        client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name=CREDENTIALS["AWS_DEFAULT_REGION"],
            aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        )
        client.create_bucket(Bucket="megahour")

        def objects() -> dict[str, bytes]:
            pages = client.get_paginator("list_objects_v2").paginate(
                Bucket="megahour", Prefix="run/"
            )
            keys = [each["Key"] for page in pages for each in page["Contents"]]
            return {
                key.removeprefix("run/"): client.get_object(Bucket="megahour", Key=key)[
                    "Body"
                ].read()
                for key in keys
            }

        yield environment, objects


def ranks(tree: Path, work: Path) -> Digests:
    """Train the local run's student again by each trainer."""
    if not (work / "run").exists():
        local(tree, work)
    found: Digests = {}
    for trainer in TRAINERS:
        run = work / trainer
        shutil.copytree(work / "run", run, ignore=shutil.ignore_patterns("student"))
        start(
            tree,
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"),
            # "--": torchrun would take --run for an abbreviation of its --run-path.
            *("-m", "--", "jobs.train_student", "--recipe", RECIPE, "--run", str(run)),
            *("--trainer", trainer),
        )
        found |= digests_of(run / "models" / "student", f"{trainer}/")
    return found


def trajectories(tree: Path, _: Path) -> Digests:
    """Record the trajectories again."""
    start(tree, "-m", "tests.trajectories.record")
    return {
        path.name: digest(path.read_bytes())
        for path in sorted((tree / "tests" / "trajectories").glob("*.json"))
    }


PARTS: dict[str, Callable[[Path, Path], Digests]] = {
    "local": local,
    "s3": s3,
    "ranks": ranks,
    "trajectories": trajectories,
}


def synthesize(tree: Path, work: Path) -> None:
    """Make the corpus that the runs ingest, a Kaldi data directory."""
    start(tree, "-m", "jobs.synthesize", "--out", str(work / "kaldi"), *CORPUS)


def whole_run(
    tree: Path, work: Path, run_uri: str, environment: Environment, python: str = sys.executable
) -> None:
    """Run every step from a Kaldi data directory."""
    start(
        tree,
        *("-m", "jobs.run", "--recipe", RECIPE, "--run", run_uri),
        *("--kaldi-dir", str(work / "kaldi"), "--supervised-ranks", "1", "--student-ranks", "4"),
        environment=environment,
        python=python,
    )


def start(
    tree: Path, *arguments: str, environment: Environment = os.environ, python: str = sys.executable
) -> None:
    """Run Python on a checkout's code; exit with its last lines if it fails."""
    done = subprocess.run(
        [python, *arguments],
        cwd=tree,
        env={**environment, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{tree.name}: {' '.join(arguments)}:\n{done.stderr[-4000:]}")


def digests_of(folder: Path, prefix: str) -> Digests:
    """Return the digest of each file below a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    keys = {str(path.relative_to(folder)): path for path in paths}
    return {
        f"{prefix}{key}": digest(path.read_bytes(), key)
        for key, path in keys.items()
        if is_compared(key)
    }


def is_compared(key: str) -> bool:
    """Return whether an object of a run holds no seconds, or can be read without them."""
    return not key.startswith(TIMED_FOLDERS) and key not in TIMED_OBJECTS


def digest(data: bytes, key: str = "") -> str:
    """Digest an object; a report without its seconds."""
    if key.endswith("report/report.json"):
        data = json.dumps(without_times(json.loads(data)), sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()


def without_times(document: Any) -> Any:
    """Leave out what differs from run to run, at any depth of JSON."""
    if isinstance(document, dict):
        return {
            name: without_times(value) for name, value in document.items() if name not in TIMED_KEYS
        }
    return [without_times(each) for each in document] if isinstance(document, list) else document


def compare(base: Digests, other: Digests) -> int:
    """Print each object that differs; return 1 if one does."""
    differing = [
        key for key in sorted(base.keys() | other.keys()) if base.get(key) != other.get(key)
    ]
    for key in differing:
        word = "missing" if key not in other else "new" if key not in base else "differs"
        print(f"{word}: {key}")
    print(f"{len(base)} objects compared, {len(differing)} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
