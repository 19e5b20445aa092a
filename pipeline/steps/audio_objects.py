"""Read a task's audio objects in order, and decide which of those that are refused are lost.

Absent or denied objects (404, 403) are a loss of data, but they look alike while access as such
has failed: a folder that is not mounted, a policy that is being changed. So what was refused is
asked for again, all together, beside an object of the task that was read.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from infra.store.object_store import (
    Fetched,
    ObjectDenied,
    ObjectNotFound,
    ObjectRead,
    ObjectStore,
    ObjectTooLarge,
    SizeBound,
    StoreError,
)
from pipeline.steps.part_requests import (
    AudioRead,
    FoundAudio,
    FoundObject,
    WantedAudio,
    in_order,
    plan_reads,
)

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

    def __init__(self, store: ObjectStore, wanted: Sequence[WantedAudio], in_flight: int) -> None:
        self._store = store
        self._reads = plan_reads(store, wanted)
        self._num_wanted = len(wanted)
        self._in_flight = in_flight
        self._refused: dict[str, Refusal] = {}
        self._lost: dict[str, Refusal] = {}
        self._neighbour = ""
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
        probes = [self._neighbour] if self._neighbour else list(pending)[:_NUM_PROBES]
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


def _answers(found: object) -> bool:
    return isinstance(found, ObjectTooLarge) or not isinstance(found, StoreError)
