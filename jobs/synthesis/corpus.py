"""Make the whole synthetic corpus as a Kaldi data directory that appears only when complete.

Its tables are those that pipeline.steps.ingestion.kaldi_directory reads.
"""

import json
import multiprocessing
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from multiprocessing.pool import Pool
from pathlib import Path
from typing import TypeVar

from infra.log_lines import progress_bar
from jobs.synthesis.sentences import Lexicon, lexicon_lines, make_lexicon
from jobs.synthesis.speakers import (
    UNLABELLED_ACCENTS,
    AcousticsTask,
    Speaker,
    SpokenUtterance,
    SynthesisConfig,
    acoustics_tasks,
    development_acoustics_task,
    render_acoustics,
    render_speaker,
    speaker_tasks,
)
from jobs.synthesis.speech import import_espeakng_loader, import_pyroomacoustics
from pipeline.audio.placements import Acoustics
from pipeline.runs.names import UNLABELLED

Subsets = dict[str, list[tuple[Speaker, list[SpokenUtterance]]]]

_FIRST_DAY = datetime(2020, 1, 1, tzinfo=UTC)
_PERIOD = timedelta(days=4)


def write_tables(directory: Path, subsets: Subsets, lexicon: Lexicon) -> None:
    """Write all tables of the data directory; text never holds the unlabelled utterances."""
    everyone = [pair for pairs in subsets.values() for pair in pairs]
    utterances = [utterance for _, some in everyone for utterance in some]
    silent = {speaker.speaker_id for speaker, _ in subsets[UNLABELLED]}
    known = [utterance for utterance in utterances if utterance.speaker_id not in silent]
    tables = {
        "wav.scp": [f"{each.utterance_id} {each.path}" for each in utterances],
        "text": [f"{each.utterance_id} {each.text}" for each in known],
        "utt2spk": [f"{each.utterance_id} {each.speaker_id}" for each in utterances],
        "utt2placement": [f"{each.utterance_id} {each.placement}" for each in utterances],
        "utt2time": [line for _, some in everyone for line in _time_lines(some)],
        "spk2locale": [f"{speaker.speaker_id} {speaker.locale}" for speaker, _ in everyone],
        "phones.ctm": [line for each in utterances for line in _ctm_lines(each)],
        "lexicon.txt": lexicon_lines(lexicon),
    }
    for subset, pairs in subsets.items():
        tables[f"{subset}.speakers"] = [speaker.speaker_id for speaker, _ in pairs]
    for name, lines in tables.items():
        _write_lines(directory / name, lines)


def _time_lines(utterances: list[SpokenUtterance]) -> list[str]:
    """Spread one speaker's utterances evenly over the period, in the order spoken."""
    step = _PERIOD / len(utterances)
    times = (_FIRST_DAY + index * step for index in range(len(utterances)))
    return [
        f"{each.utterance_id} {time.isoformat(timespec='milliseconds')}"
        for each, time in zip(utterances, times, strict=True)
    ]


def _ctm_lines(utterance: SpokenUtterance) -> Iterable[str]:
    """Yield Kaldi's time-marked phones: utterance, channel, start and duration (s), phone."""
    for segment in utterance.phones:
        duration_s = segment.end_s - segment.start_s
        yield (f"{utterance.utterance_id} 1 {segment.start_s:.4f} {duration_s:.4f} {segment.phone}")


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines))


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
    context.set_forkserver_preload(["jobs.synthesis.speakers", "jobs.synthesis.sentences"])
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
