"""Read a task's audio in order: parts of one object share requests, and refusals are confirmed.

Utterances come in the order of their streams, and not as they lie in their objects. So within a
window of neighbouring utterances, whose audio memory can hold, parts are put together by object.

Absent or denied objects (404, 403) are a loss of data, but they look alike while access as such
has failed: a folder that is not mounted, a policy that is being changed. So what was refused is
asked for again, all together, beside an object of the task that was read.
"""

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from infra.store.object_store import (
    Fetched,
    ObjectDenied,
    ObjectNotFound,
    ObjectRead,
    ObjectStore,
    ObjectTooLarge,
    PrefixError,
    SizeBound,
    StoreError,
)
from infra.store.objects import Admit, FetchedRange
from pipeline.audio.audio_file import MAX_RECORDING_BYTES
from pipeline.audio.codecs import codec_of
from pipeline.audio.conversion import require_accepted
from pipeline.audio.decode import HEAD_BYTES, cut_recording, segment_samples
from pipeline.audio.errors import AudioError, AudioReason
from pipeline.audio.wav import WavLayout, is_wav, wav_file, wav_layout
from pipeline.packing import runs_by_bytes
from pipeline.records import AudioPart, Member, Segment
from pipeline.runs.names import ACCESS_DENIED, MISSING_OBJECT, OUTSIDE_PREFIXES
from pipeline.settings import NO_CONVERSION, AudioConversion

WINDOW_BYTES = 64 * 2**20
"""The bytes that a window's utterances probably have: half an hour of 16 kHz audio."""

MAX_GAP_BYTES = 2**16
"""Ranges that are so near are one request: 64 KB cost less than a request's latency."""

MAX_RANGE_BYTES = 16 * 2**20
"""Ranges are joined up to so many bytes."""

FoundAudio: TypeAlias = Fetched | StoreError | AudioError

REFUSALS: Mapping[type[StoreError], AudioReason] = {
    ObjectNotFound: MISSING_OBJECT,
    ObjectDenied: ACCESS_DENIED,
    PrefixError: OUTSIDE_PREFIXES,
    ObjectTooLarge: "too_large",
}
"""The ledger's reasons for audio that the store refuses."""


def require_audio(found: FoundAudio) -> Fetched:
    """Return an utterance's audio; AudioError with the ledger's reason if it cannot be read.

    A fault of the store itself is raised as it is.
    """
    if isinstance(found, Fetched):
        return found
    if isinstance(found, AudioError):  # one error may be that of many segments
        raise AudioError(found.reason, found.detail)
    raise AudioError(refusal(found), str(found)) from found


def refusal(error: StoreError) -> AudioReason:
    """Return the ledger's reason of an object that cannot be read; raise what is no refusal."""
    if (reason := REFUSALS.get(type(error))) is None:
        raise error
    return reason


@dataclass(frozen=True, slots=True)
class WantedAudio:
    """WantedAudio is one utterance's audio: an object or a part of it, and the bytes it may have.

    `conversion` says which rates and channels of a recording are accepted.
    """

    uri: str
    bound: SizeBound
    part: AudioPart | None = None
    conversion: AudioConversion = NO_CONVERSION


@dataclass(frozen=True, slots=True)
class WholeRecording:
    """WholeRecording is decoded where it is used, so that one is in memory decoded at a time."""

    data: bytes
    segments: tuple[Segment, ...]
    conversion: AudioConversion

    def audio(self) -> Sequence[FoundAudio]:
        """Return the audio of the utterances of the read, in their order."""
        try:
            cut = cut_recording(self.data, self.segments, self.conversion)
        except AudioError as error:
            return [error] * len(self.segments)
        return [each if isinstance(each, AudioError) else _fetched(each) for each in cut]


FoundObject: TypeAlias = tuple[FoundAudio, ...] | WholeRecording
"""The audio of the utterances of one read, in their order, or the recording that has it."""


@dataclass(frozen=True, slots=True)
class AudioRead:
    """AudioRead is one object's read, for the utterances with these numbers of the task."""

    numbers: tuple[int, ...]
    request: ObjectRead[FoundObject]


def plan_reads(store: ObjectStore, wanted: Sequence[WantedAudio]) -> list[AudioRead]:
    """Return the reads of a task in the order in which their first utterance is needed."""
    reads: list[AudioRead] = []
    for place in runs_by_bytes(list(map(_held_bytes, wanted)), WINDOW_BYTES):
        window = range(len(wanted))[place]
        in_window = [_read_of(store, wanted, numbers) for numbers in _by_object(wanted, window)]
        reads += sorted(in_window, key=lambda read: min(read.numbers))
    return reads


def read_audio(
    store: ObjectStore, wanted: Sequence[WantedAudio], in_flight: int
) -> Iterator[FoundAudio]:
    """Yield each utterance's audio as it is now, or its error."""
    reads = plan_reads(store, wanted)
    answers = store.read_each([each.request for each in reads], in_flight)
    found = ((read, answer) for read, (_, answer) in zip(reads, answers, strict=True))
    return in_order(len(wanted), found)


def in_order(
    num_wanted: int, answers: Iterator[tuple[AudioRead, FoundObject | StoreError]]
) -> Iterator[FoundAudio]:
    """Yield the utterances' audio by their numbers; hold what a read brought for later ones."""
    held: dict[int, FoundAudio] = {}
    for number in range(num_wanted):
        while number not in held:
            read, found = next(answers)
            if isinstance(found, StoreError):
                held.update(dict.fromkeys(read.numbers, found))
            else:
                audio = found.audio() if isinstance(found, WholeRecording) else found
                held.update(zip(read.numbers, audio, strict=True))
                del audio
            del found  # one name less keeps the bytes alive
        yield held.pop(number)
    next(answers, None)  # an error behind the last one, and the end of the readers' threads


def _held_bytes(wanted: WantedAudio) -> int:
    # A member's bytes are held until its turn, and it says itself how many they are.
    stated = wanted.part.num_bytes if isinstance(wanted.part, Member) else 0
    return max(wanted.bound.expected_bytes, stated)


def _by_object(wanted: Sequence[WantedAudio], window: range) -> Iterator[list[int]]:
    """Yield the utterances of each read: a whole object, a recording, or near members of a tar."""
    recordings, archives = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    for number in window:
        part = wanted[number].part
        if isinstance(part, Segment):
            recordings[wanted[number].uri].append(number)
        elif isinstance(part, Member):
            archives[wanted[number].uri].append(number)
        else:
            yield [number]
    yield from recordings.values()
    for numbers in archives.values():
        spans = {number: _member_span(wanted[number].part) for number in numbers}
        for run in joined_ranges([spans[number] for number in numbers]):
            yield [numbers[position] for position in run]


def _fetched(data: bytes) -> Fetched:
    return Fetched(data, hashlib.md5(data, usedforsecurity=False).hexdigest())


def _member_span(part: AudioPart | None) -> tuple[int, int]:
    assert isinstance(part, Member), "archives hold members"
    return part.offset, part.num_bytes


def joined_ranges(ranges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Put ranges, of first byte and number of bytes, together that one request can read.

    Returns the positions of each request's ranges, in the order of their bytes.
    """
    runs: list[list[int]] = []
    start, end = 0, 0
    for position in sorted(range(len(ranges)), key=lambda each: ranges[each]):
        first, size = ranges[position]
        is_near = bool(runs) and first - end <= MAX_GAP_BYTES
        if is_near and max(end, first + size) - start <= MAX_RANGE_BYTES:
            runs[-1].append(position)
            end = max(end, first + size)
        else:
            runs.append([position])
            start, end = first, first + size
    return runs


def _read_of(
    store: ObjectStore, wanted: Sequence[WantedAudio], numbers: Sequence[int]
) -> AudioRead:
    some = [wanted[number] for number in numbers]
    first, uri = some[0], some[0].uri
    if first.part is None:
        fetch: Callable[[Admit], FoundObject] = partial(_whole, store, uri)
        read = ObjectRead(uri, first.bound, fetch)
        return AudioRead(tuple(numbers), read)
    function = _segments if isinstance(first.part, Segment) else _members
    expected = SizeBound(sum(each.bound.expected_bytes for each in some))
    return AudioRead(tuple(numbers), ObjectRead(uri, expected, partial(function, store, some)))


def _whole(store: ObjectStore, uri: str, admit: Admit) -> FoundObject:
    return (store.fetch(uri, admit),)


def _members(store: ObjectStore, wanted: Sequence[WantedAudio], admit: Admit) -> FoundObject:
    """Read near members of an archive by one request."""
    uri = wanted[0].uri
    found: dict[int, FoundAudio] = {}
    kept: dict[int, tuple[int, int]] = {}
    for number, each in enumerate(wanted):
        first, size = _member_span(each.part)
        most = each.bound.max_bytes
        if most is None or size <= most:
            kept[number] = first, size
        else:
            said = f"{uri}: a member of {size} bytes: need at most {most}"
            found[number] = ObjectTooLarge(said)
    if kept:
        start = min(first for first, _ in kept.values())
        num_bytes = max(first + size for first, size in kept.values()) - start
        admit(num_bytes)
        read = store.fetch_range(uri, start, num_bytes)
        for number, (first, size) in kept.items():
            if first + size > read.object_bytes:
                where = f"bytes {first} to {first + size} of {uri}, which has {read.object_bytes}"
                found[number] = AudioError("member_beyond_end", f"a member of {where}")
            else:
                found[number] = _fetched(read.data[first - start : first - start + size])
    return tuple(found[number] for number in range(len(wanted)))


def _segments(store: ObjectStore, wanted: Sequence[WantedAudio], admit: Admit) -> FoundObject:
    """Read a WAV's segments by ranges, as its header places them; other recordings whole."""
    uri, segments = wanted[0].uri, tuple(each.part for each in wanted)
    known = tuple(part for part in segments if isinstance(part, Segment))
    assert len(known) == len(segments), "a read of segments has no members"
    conversion = wanted[0].conversion
    head = store.fetch_range(uri, 0, HEAD_BYTES)
    try:
        if is_wav(head.data):
            recording = ObjectRanges(store, uri, head)
            layout = wav_layout(recording.read, head.object_bytes)
            if layout.frame_bytes:
                require_accepted(conversion, layout.rate_hz, layout.num_channels)
                layout.require_whole(recording.read)
                return _wav_segments(recording, layout, known, admit)
        elif head.data and not head.data.startswith(b"ID3"):
            codec_of(head.data)
    except AudioError as error:
        return (error,) * len(known)
    data = head.data
    if head.object_bytes > len(data):
        if head.object_bytes > MAX_RECORDING_BYTES:
            raise ObjectTooLarge(
                f"{uri}: a recording of {head.object_bytes} bytes: need at most "
                f"{MAX_RECORDING_BYTES}, or a WAV, of which segments are read alone"
            )
        data = store.fetch(uri, admit).data
    return WholeRecording(data, known, conversion)


@dataclass(slots=True)
class ObjectRanges:
    """ObjectRanges reads an object by ranges: its head is there, and what was read last is kept."""

    store: ObjectStore
    uri: str
    head: FetchedRange
    first: int = 0
    data: bytes = b""

    def read(self, first: int, num_bytes: int) -> bytes:
        """Return so many bytes; fewer where the object ends."""
        end = min(first + num_bytes, self.head.object_bytes)
        if end <= max(first, len(self.head.data)):
            return self.head.data[first:end]
        if not self.first <= first <= end <= self.first + len(self.data):
            most = self.head.object_bytes - first
            self.first, self.data = first, self.fetch(first, min(max(num_bytes, HEAD_BYTES), most))
        return self.data[first - self.first : end - self.first]

    def fetch(self, first: int, num_bytes: int) -> bytes:
        """Request so many bytes, which must be there; StoreError if the object has changed."""
        found = self.store.fetch_range(self.uri, first, num_bytes)
        if found.etag != self.head.etag or len(found.data) < num_bytes:
            raise StoreError(
                f"{self.uri}: it changed while its segments were read: leave the audio as it is, "
                "then run the step again"
            )
        return found.data


def _wav_segments(
    recording: ObjectRanges, layout: WavLayout, segments: Sequence[Segment], admit: Admit
) -> tuple[FoundAudio, ...]:
    """Read the samples of a WAV's segments; near ones by one request."""
    found: dict[int, FoundAudio] = {}
    ranges: dict[int, tuple[int, int]] = {}
    for number, segment in enumerate(segments):
        try:
            first, count = segment_samples(segment, layout.rate_hz, layout.num_samples)
        except AudioError as error:
            found[number] = error
            continue
        ranges[number] = layout.start + first * layout.frame_bytes, count * layout.frame_bytes
    numbers = list(ranges)
    admit(sum(size for _, size in ranges.values()))
    for run in joined_ranges(list(ranges.values())):
        some = {numbers[each]: ranges[numbers[each]] for each in run}
        start = min(first for first, _ in some.values())
        data = recording.fetch(start, max(first + size for first, size in some.values()) - start)
        for number, (first, size) in some.items():
            samples = data[first - start : first - start + size]
            found[number] = _fetched(wav_file(layout.format_chunk, samples))
        del data  # before the next request
    return tuple(found[number] for number in range(len(segments)))


CONFIRMING_WAITS_S = (1.0, 2.0, 4.0)
"""A refused object is lost if it is refused alike after each of these waits."""

PATIENCE_S = 30.0
"""The sum of waits for access, while objects that must answer do not; then the task fails."""

_NUM_PROBES = 16

Refusal = ObjectNotFound | ObjectDenied


class AudioObjects:
    """AudioObjects reads the objects of one task, `in_flight` at a time.

    The first reading yields refusals as they come, and decides about all of them at its end. If an
    object answers then, `must_be_repeated` is True: that object belongs before others in its
    stream. The second reading waits for each decision, and so needs no third.
    """

    def __init__(
        self, store: ObjectStore, wanted: Sequence[WantedAudio], in_flight: int, neighbour: str = ""
    ) -> None:
        self._store = store
        self._reads = plan_reads(store, wanted)
        self._num_wanted = len(wanted)
        self._in_flight = in_flight
        self._refused: dict[str, Refusal] = {}
        self._lost: dict[str, Refusal] = {}
        self._neighbour = neighbour
        self._is_repeated = False
        self.must_be_repeated = False

    @property
    def has_answered(self) -> bool:
        """True once an object was read."""
        return self._neighbour != ""

    def read(self) -> Iterator[FoundAudio]:
        """Yield each utterance's audio, or the error of its object or its part."""
        yield from in_order(self._num_wanted, self._read_objects())
        self.end_reading()

    def _read_objects(self) -> Iterator[tuple[AudioRead, FoundObject | StoreError]]:
        """Yield each read, and its object or the error of its object."""
        self.must_be_repeated, lost = False, dict(self._lost)
        asked = [each.request for each in self._reads if each.request.uri not in lost]
        answers = self._store.read_each(asked, self._in_flight)
        for each in self._reads:
            uri = each.request.uri
            found = lost[uri] if uri in lost else next(answers)[1]
            if _answers(found):
                self._neighbour = uri
            elif isinstance(found, Refusal) and uri not in lost:
                found = self._decided(each.request, found)
            yield each, found
            del found  # before the next one comes

    def read_decided(self) -> Iterator[FoundAudio]:
        """Yield each utterance's audio, or its error, decided about before the next one is read.

        This is for utterances that are no stream: none has to be read again.
        """
        self._is_repeated = True
        return self.read()

    def end_reading(self) -> None:
        """Decide about all that was refused in the first reading, however far it went."""
        if not self._is_repeated:
            self._is_repeated = True
            self.must_be_repeated = self._decide(self._refused)

    def _decided(
        self, request: ObjectRead[FoundObject], refusal: Refusal
    ) -> FoundObject | StoreError:
        uri = request.uri
        if not self._is_repeated:
            self._refused[uri] = refusal
            return refusal
        # Another read of this object may have been decided about already.
        if uri in self._lost or not self._decide({uri: refusal}):
            return self._lost[uri]
        [(_, found)] = self._store.read_each([request], 1)
        if isinstance(found, Refusal):
            raise StoreError(f"{found}; it answered a moment ago: check the store, then run again")
        return found

    def _decide(self, refused: Mapping[str, Refusal]) -> bool:
        """Ask until each object answers, or is refused after all waits; True if one answers."""
        pending, waited_s, num_refusals = dict(refused), 0.0, 0
        while pending and num_refusals < len(CONFIRMING_WAITS_S):
            if waited_s >= PATIENCE_S:
                raise self._no_access(pending)
            time.sleep(CONFIRMING_WAITS_S[num_refusals])
            waited_s += CONFIRMING_WAITS_S[num_refusals]
            if not self._has_access(pending):
                continue
            still = {uri: it for uri, it in self._ask(pending).items() if isinstance(it, Refusal)}
            is_alike = all(type(still[uri]) is type(pending[uri]) for uri in still)
            pending = still
            # A refusal counts between two answers of a neighbour.
            if self._has_access(pending):
                num_refusals = num_refusals + 1 if is_alike else 0
        self._lost |= pending
        return len(pending) < len(refused)

    def _has_access(self, pending: Mapping[str, Refusal]) -> bool:
        """Return whether an object that was read before answers; without one, look for one."""
        # Those that were not read yet come first: the task may begin with what is lost.
        unread = (each.request.uri for each in self._reads if each.request.uri not in pending)
        some = list(dict.fromkeys((*unread, *pending)))[:_NUM_PROBES]
        probes = [self._neighbour] if self._neighbour else some
        found = self._ask(probes)
        self._neighbour = next((uri for uri in probes if _answers(found[uri])), self._neighbour)
        return any(map(_answers, found.values()))

    def _ask(self, uris: Iterable[str]) -> dict[str, Fetched | StoreError]:
        # At most 0 bytes: an object that is there is too large, and none of its bytes are read.
        asked = list(uris)
        none = [SizeBound(max_bytes=0)] * len(asked)
        answers = dict(self._store.get_many(asked, self._in_flight, none))
        for answer in answers.values():
            if not _answers(answer) and not isinstance(answer, Refusal):
                assert isinstance(answer, StoreError), "an answer is bytes or an error"
                raise answer
        return answers

    def _no_access(self, pending: Mapping[str, Refusal]) -> StoreError:
        refusal = next(iter(pending.values()))
        others = f", nor does {self._neighbour}, which did" if self._neighbour else ""
        return StoreError(
            f"{refusal} ({len(pending)} audio objects of one task are refused, and for "
            f"{PATIENCE_S:.0f} s no other of its objects answers{others}): is the audio mounted, "
            "moved, or closed to these credentials? The task is not committed: restore access, "
            "then run the step again"
        )


def lost_objects(
    store: ObjectStore, refused: Mapping[str, Refusal], neighbour: str
) -> Collection[str]:
    """Return those of some refused objects that remain so; StoreError while no object answers.

    `neighbour` is one that did, if any.
    """
    objects = AudioObjects(store, (), _NUM_PROBES, neighbour)
    objects._decide(refused)
    return objects._lost.keys()


def _answers(found: object) -> bool:
    return isinstance(found, ObjectTooLarge) or not isinstance(found, StoreError)
