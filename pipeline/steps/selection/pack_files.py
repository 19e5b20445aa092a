"""Pack the selected speakers of some buckets, whole, into nearly equal selection files."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.packing import Balance, pack_speakers
from pipeline.records import Tally, parse_utterance
from pipeline.runs.commit import Commit, StepContext, once
from pipeline.runs.ledger import ledger_reasons
from pipeline.runs.manifest import Output, read_output
from pipeline.runs.names import LEDGER_SUFFIX


@dataclass(frozen=True, slots=True)
class PackTask:
    """PackTask holds the commits of neighbouring buckets, whose speakers are packed together."""

    context: StepContext
    name: str
    file_hours: float
    selected: tuple[Commit, ...]


@dataclass(slots=True)
class _Stream:
    """The lines of a speaker's utterances, in stream order."""

    lines: list[bytes]
    duration_ms: int = 0

    @property
    def tally(self) -> Tally:
        return Tally(len(self.lines), self.duration_ms)


@once
def pack_files(task: PackTask) -> Commit:
    """Pack speakers into files, and join the buckets' ledgers."""
    streams = _read_streams(task)
    durations_ms = {speaker: stream.duration_ms for speaker, stream in streams.items()}
    # Only neighbouring buckets are packed together, which spares a shuffle of all speakers (IV-A2).
    packed = pack_speakers(durations_ms, task.file_hours)
    quarantined = sum((commit.quarantined for commit in task.selected), Tally())
    record = Commit(
        task=task.name,
        fingerprint=task.context.fingerprint,
        outputs=tuple(
            _write_file(task, number, [streams[speaker] for speaker in speakers])
            for number, speakers in enumerate(packed)
        ),
        ledger=_join_ledgers(task, quarantined),
        tally_in=sum((commit.tally_in for commit in task.selected), Tally()),
        quarantined=quarantined,
        unselected=sum((commit.unselected for commit in task.selected), Tally()),
        statistics={"balance": Balance.of(packed, durations_ms).to_dict()},
    )
    return task.context.commit(record)


def _read_streams(task: PackTask) -> dict[str, _Stream]:
    streams: dict[str, _Stream] = defaultdict(lambda: _Stream([]))
    for output in (output for commit in task.selected for output in commit.outputs):
        for line in read_output(task.context.store, task.context.run_uri, output).splitlines():
            utterance = parse_utterance(line.decode())
            stream = streams[utterance.speaker_id]
            # The lines are in stream order already, as the causal mean needs them.
            stream.lines.append(line)
            stream.duration_ms += utterance.duration_ms
    return streams


def _write_file(task: PackTask, number: int, streams: Sequence[_Stream]) -> Output:
    data = b"".join(line + b"\n" for stream in streams for line in stream.lines)
    tally = sum((stream.tally for stream in streams), Tally())
    return task.context.put_output(f"{task.name}-{number:05d}", ".jsonl", data, tally)


def _join_ledgers(task: PackTask, quarantined: Tally) -> Output | None:
    if not quarantined.utterances:
        return None
    ledgers = [commit.ledger for commit in task.selected if commit.ledger]
    place = task.context.store, task.context.run_uri
    data = b"".join(read_output(*place, each) for each in ledgers)
    stored = task.context.put_output(task.name, LEDGER_SUFFIX, data, quarantined)
    return replace(stored, reasons=dict(ledger_reasons(*place, ledgers)))
