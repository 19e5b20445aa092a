"""Measure whether an hour of audio costs the same from one hour to a hundred.

python -m tests.benchmarks.extraction_cost [--hours 1,3,10,30,100] [--spark] [--json]

The same FLAC objects (AN4 beside the checkout, or synthetic speech) are named by as many metadata
records as make each size. The real extraction step runs over them in a plain loop, or on a local
Spark session. Cost is processor time in its tasks, without the session's start. Shards are removed
as they are written, so a hundred hours need no more disk than one file of five.
"""

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import soundfile

from infra.cluster import load_cluster
from infra.spark.session import run_tasks, spark_session
from infra.store.object_store import ObjectStore, join_uri
from jobs.planning.measurement import flac, speech_like
from pipeline.records import Utterance
from pipeline.runs.commit import Commit
from pipeline.steps.features import ExtractionConfig, extract_features
from pipeline.steps.selection.select import SelectionConfig, metadata_uri, select_utterances
from tests.benchmarks.measure import Figure, show
from tests.small_corpus import serially

T = TypeVar("T")
R = TypeVar("R")

AN4_AUDIO = Path(__file__).parents[3] / "shared" / "corpora" / "an4" / "audio"
NUM_MADE_UP = 200
UTTERANCES_PER_SPEAKER = 50
REFERENCE_HOURS = 10.0
MAX_ROUNDS = 5

Audio = tuple[str, float]
"""A FLAC object's path, and its seconds."""


@dataclass(frozen=True)
class Timed:
    """Timed is a task's function that measures its processor time and removes its shards."""

    function: Callable[[Any], Commit]
    run_uri: str

    def __call__(self, element: Any) -> tuple[Commit, float]:
        """Run the task."""
        before = time.process_time()
        commit = self.function(element)
        spent = time.process_time() - before
        for output in commit.outputs:
            Path(self.run_uri, output.key).unlink()
        return commit, spent


class Loop:
    """Loop runs tasks one after the other, or on Spark, and sums their processor time."""

    def __init__(self, run_uri: str, spark: Any) -> None:
        self.run_uri, self.spark = run_uri, spark
        self.seconds = 0.0

    def __call__(
        self, elements: Sequence[T], function: Callable[[T], R], description: str
    ) -> list[R]:
        """Run `function` on each element."""
        timed: Any = Timed(function, self.run_uri)
        run = serially if self.spark is None else run_on(self.spark)
        done = run(elements, timed, description)
        self.seconds += sum(seconds for _, seconds in done)
        return [commit for commit, _ in done]


def run_on(spark: Any) -> Callable[..., list[Any]]:
    """Run Spark tasks in place of the loop."""
    return lambda elements, function, name: run_tasks(spark, elements, function, name)


def find_audio(folder: Path) -> tuple[list[Audio], str]:
    """Return AN4's FLAC files, or write synthetic speech of two to six seconds to `folder`."""
    paths = sorted(AN4_AUDIO.rglob("*.flac"))
    source = "AN4"
    if not paths:
        source = "made-up speech"
        paths = [folder / f"{number}.flac" for number in range(NUM_MADE_UP)]
        for number, path in enumerate(paths):
            path.write_bytes(flac(speech_like(number, 2.0 + number % 5)))
    return [(str(path), soundfile.info(path).duration) for path in paths], source


def records(audio: Sequence[Audio], hours: float) -> Iterator[Utterance]:
    """Make as many records as make `hours`, each naming one of the same objects."""
    seconds = 0.0
    for number, (path, duration_s) in enumerate(itertools.cycle(audio)):
        if seconds >= hours * 3600:
            return
        seconds += duration_s
        speaker, place = divmod(number, UTTERANCES_PER_SPEAKER)
        yield Utterance(
            utterance_id=f"utterance-{number:07d}",
            speaker_id=f"speaker-{speaker:06d}",
            duration_s=duration_s,
            created_at=f"2026-01-01T00:{place:02d}:00+00:00",
            locale="en-US",
            audio_uri=path,
        )


def cost(audio: Sequence[Audio], hours: float, file_hours: float, spark: Any) -> float:
    """Return the core-seconds of extraction for an hour of audio, at this size."""
    with tempfile.TemporaryDirectory() as folder:
        run_uri, corpus_uri = join_uri(folder, "run"), join_uri(folder, "corpus")
        store = ObjectStore((folder, *{str(Path(path).parent) for path, _ in audio}))
        metadata = metadata_uri(corpus_uri, "unlabelled")
        lines = "".join(record.to_json() + "\n" for record in records(audio, hours))
        store.put(join_uri(metadata, "speaker_bucket=00", "records.jsonl"), lines.encode())
        selection = SelectionConfig(hours=0.0, file_hours=file_hours, seed=1)
        select_utterances(store, run_uri, "unlabelled", metadata, selection, 0.0, serially)
        loop, config = Loop(run_uri, spark), ExtractionConfig(gets_in_flight=32, seed=1)
        # Bad audio would make an hour cheaper: AN4's is good, so none may be lost.
        manifest = extract_features(
            store, run_uri, "unlabelled", corpus_uri, config, 0.0, loop
        ).manifest
        return loop.seconds / manifest.tally_out.hours


@contextmanager
def session(on_spark: bool) -> Iterator[Any]:
    """Yield a local Spark session of two cores, or None."""
    if not on_spark:
        yield None
        return
    with spark_session("extraction cost", load_cluster("demo")) as spark:
        yield spark


def measure(sizes: Sequence[float], file_hours: float, on_spark: bool) -> tuple[list[Figure], str]:
    """Return core-seconds an hour of audio at each size, and relative to the reference size."""
    with tempfile.TemporaryDirectory() as folder, session(on_spark) as spark:
        audio, source = find_audio(Path(folder))
        cost(audio, min(sizes) / 5, file_hours, spark)
        costs = {size: rounds(audio, size, file_hours, spark) for size in sizes}
    figures = [
        Figure.of(f"{size:g} h", values, "core-seconds an hour") for size, values in costs.items()
    ]
    medians = dict(zip(sizes, (figure.median for figure in figures), strict=True))
    reference = REFERENCE_HOURS if REFERENCE_HOURS in medians else sizes[-1]
    ratios = [median / medians[reference] for median in medians.values()]
    figures += [
        Figure.of(f"{size:g} h / {reference:g} h", [ratio], "")
        for size, ratio in zip(sizes, ratios, strict=True)
    ]
    spread = Figure.of("largest / smallest of all sizes", [max(ratios) / min(ratios)], "")
    return [*figures, spread], source


def rounds(audio: Sequence[Audio], size: float, file_hours: float, spark: Any) -> list[float]:
    """Return the rounds: small sizes are repeated up to ten hours, at most five times."""
    number = min(max(round(REFERENCE_HOURS / size), 1), MAX_ROUNDS)
    found = []
    for repeat in range(number):
        found.append(cost(audio, size, file_hours, spark))
        print(f"{size:g} h, {repeat + 1} of {number}: {found[-1]:.3f}", file=sys.stderr)
    return found


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", default="1,3,10,30,100", help="sizes, with commas between")
    parser.add_argument("--file-hours", type=float, default=5.0, help="of a selection file (5)")
    parser.add_argument("--spark", action="store_true", help="on a local Spark session")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sizes = [float(size) for size in arguments.hours.split(",")]
    figures, source = measure(sizes, arguments.file_hours, arguments.spark)
    how = "on local Spark" if arguments.spark else "in a plain loop"
    show(f"Extraction of {source}, {how}", figures, arguments.json)


if __name__ == "__main__":
    main()
