"""Write metadata objects below `date=.../speaker_bucket=.../`, within bounded memory."""

import gzip
from collections import defaultdict
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import blake2b

from infra.store.object_store import ObjectStore, join_uri
from pipeline.records import Tally, Utterance
from pipeline.runs.manifest import Output, sha256

MAX_HELD_BYTES = 64 * 2**20
"""A task holds so many bytes of records, then writes those of every folder."""


class MetadataObjects:
    """MetadataObjects holds one task's records by folder, and writes objects named by digests."""

    def __init__(
        self, store: ObjectStore, corpus_uri: str, prefix: str, task: str, num_buckets: int
    ) -> None:
        self._store, self._corpus_uri, self._prefix = store, corpus_uri, prefix
        self._task, self._num_buckets = task, num_buckets
        self._lines: dict[str, list[tuple[str, int]]] = defaultdict(list)
        self._num_bytes = 0
        self._outputs: list[Output] = []

    def add(self, record: Utterance) -> None:
        """Add a record to the folder of its day and its speaker's bucket."""
        line = record.to_json()
        self._lines[self._folder(record)].append((line, record.duration_ms))
        self._num_bytes += len(line)
        if self._num_bytes >= MAX_HELD_BYTES:
            self._write()

    def finish(self) -> tuple[Output, ...]:
        """Write what is held, and return all objects in the order of their keys."""
        self._write()
        return tuple(sorted(self._outputs, key=lambda output: output.key))

    def _folder(self, record: Utterance) -> str:
        moment = datetime.fromisoformat(record.created_at)
        with suppress(OverflowError):  # at the calendar's edge its own date serves as well
            moment = moment.astimezone(UTC)
        bucket = speaker_bucket(record.speaker_id, self._num_buckets)
        return f"date={moment.date().isoformat()}/speaker_bucket={bucket}"

    def _write(self) -> None:
        for folder, lines in sorted(self._lines.items()):
            text = "".join(f"{line}\n" for line, _ in lines).encode()
            # Without a time in the header, the same records give the same bytes.
            data = gzip.compress(text, compresslevel=6, mtime=0)
            digest = sha256(data)
            key = f"{self._prefix}/{folder}/{self._task}-{digest[:16]}.jsonl.gz"
            self._store.put(join_uri(self._corpus_uri, key), data)
            tally = Tally(len(lines), sum(duration_ms for _, duration_ms in lines))
            self._outputs.append(
                Output(key, len(data), digest, tally.utterances, tally.duration_ms)
            )
        self._lines.clear()
        self._num_bytes = 0


def speaker_bucket(speaker_id: str, num_buckets: int) -> str:
    """Return the number of a speaker's bucket, by a hash of the id."""
    value = int.from_bytes(blake2b(speaker_id.encode(), digest_size=8).digest(), "big")
    return f"{value % num_buckets:0{max(len(str(num_buckets - 1)), 2)}d}"
