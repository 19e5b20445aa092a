"""Write the tables of the corpus, as jobs.ingestion.kaldi_directory reads them."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from jobs.synthesis.pronunciations import Lexicon, lexicon_lines
from jobs.synthesis.rendering import SpokenUtterance
from jobs.synthesis.speakers import Speaker
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
