"""Make the whole synthetic corpus as a Kaldi data directory that appears only when complete."""

import json
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.pool import Pool
from pathlib import Path
from typing import TypeVar

from infra.log_lines import progress_bar
from jobs.synthesis.data_directory import Subsets, write_tables
from jobs.synthesis.demo_extra import import_espeakng_loader, import_pyroomacoustics
from jobs.synthesis.plan import (
    SynthesisConfig,
    acoustics_tasks,
    development_acoustics_task,
    speaker_tasks,
)
from jobs.synthesis.pronunciations import Lexicon, make_lexicon
from jobs.synthesis.rendering import AcousticsTask, render_acoustics, render_speaker
from jobs.synthesis.speakers import UNLABELLED_ACCENTS
from pipeline.audio.placements import Acoustics

_RECORD = "synthesis.json"
Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class SynthesisSummary:
    """SynthesisSummary holds utterances and hours by subset, and the size of the lexicon."""

    utterances: dict[str, int]
    hours: dict[str, float]
    lexicon_words: int
    lexicon_pronunciations: int


def synthesize(
    config: SynthesisConfig, directory: Path, num_processes: int = 2
) -> SynthesisSummary:
    """Make the corpus at `directory`, unless it is complete there; summarize it.

    The bytes depend on `config` alone, not on `num_processes`. Raises ValueError if `directory`
    holds another corpus, or other files.
    """
    import_espeakng_loader()
    import_pyroomacoustics()
    directory = directory.absolute()
    if (summary := _completed(config, directory)) is not None:
        return summary
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
        made = Path(scratch) / "corpus"
        made.mkdir()
        summary = _make(config, made, Path(scratch), num_processes)
        record = {"config": asdict(config), "summary": asdict(summary)}
        (made / _RECORD).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
        made.replace(directory)
    return summary


def draw_acoustics(seed: int) -> tuple[Acoustics, Acoustics]:
    """Draw the rooms and noises of training, and others for held-out speakers, in 20 s.

    Babble and rooms need the demo extra: ImportError says what to install.
    """
    training, heldout = _draw(partial(acoustics_tasks, seed))
    return training, heldout


def draw_development_acoustics(seed: int) -> Acoustics:
    """Draw the rooms and noises of development speakers, which no others hear, in 10 s."""
    (development,) = _draw(lambda scratch: [development_acoustics_task(seed, scratch)])
    return development


def _draw(tasks_in: Callable[[Path], Sequence[AcousticsTask]]) -> list[Acoustics]:
    import_espeakng_loader()
    import_pyroomacoustics()
    with tempfile.TemporaryDirectory() as scratch, _fresh_processes(2) as pool:
        tasks = tasks_in(Path(scratch))
        _run(pool, render_acoustics, tasks, "rooms and noise")
        return [Acoustics.load(task.path) for task in tasks]


def _completed(config: SynthesisConfig, directory: Path) -> SynthesisSummary | None:
    if not directory.exists() or not any(directory.iterdir()):
        return None
    remedy = "remove it or choose another directory"
    if not (directory / _RECORD).exists():
        raise ValueError(f"{directory}: holds files that are no synthetic corpus: {remedy}")
    record = json.loads((directory / _RECORD).read_text())
    if record["config"] != asdict(config):
        raise ValueError(f"{directory}: holds a corpus of {record['config']}: {remedy}")
    return SynthesisSummary(**record["summary"])


def _make(
    config: SynthesisConfig, made: Path, scratch: Path, num_processes: int
) -> SynthesisSummary:
    with _fresh_processes(num_processes) as pool:
        making_lexicon = pool.apply_async(make_lexicon, (UNLABELLED_ACCENTS, config.seed))
        _run(pool, render_acoustics, acoustics_tasks(config.seed, scratch), "rooms and noise")
        spoken = iter(_run(pool, render_speaker, speaker_tasks(config, made, scratch), "speakers"))
        lexicon = making_lexicon.get()
    subsets = {
        subset: [(speaker, next(spoken)) for speaker in speakers]
        for subset, speakers in config.speakers().items()
    }
    write_tables(made, subsets, lexicon)
    return _summarize(subsets, lexicon)


@contextmanager
def _fresh_processes(num_processes: int) -> Iterator[Pool]:
    """Yield processes that run one task each: espeak-ng's state outlives its re-initialization.

    They fork from a server that has imported the code, at 6 ms a task.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["jobs.synthesis.rendering", "jobs.synthesis.pronunciations"])
    with context.Pool(num_processes, maxtasksperchild=1) as pool:
        yield pool


def _run(
    pool: Pool, function: Callable[[Task], Result], tasks: Sequence[Task], description: str
) -> list[Result]:
    results = pool.imap(function, tasks)
    return list(progress_bar(results, description=description, total=len(tasks)))


def _summarize(subsets: Subsets, lexicon: Lexicon) -> SynthesisSummary:
    durations_s = {
        subset: [utterance.duration_s for _, some in pairs for utterance in some]
        for subset, pairs in subsets.items()
    }
    return SynthesisSummary(
        utterances={subset: len(some) for subset, some in durations_s.items()},
        hours={subset: round(sum(some) / 3600, 4) for subset, some in durations_s.items()},
        lexicon_words=len(lexicon),
        lexicon_pronunciations=sum(map(len, lexicon.values())),
    )
