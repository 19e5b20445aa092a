"""The k best of an utterance as shards hold them: at one offset, or at all three (003 II-B)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from pipeline.kbest import KBest, require_below_k
from pipeline.splicing import STACK, num_low_rate_frames

Offsets = Literal["one", "all"]

OFFSETS_ENTRY = "offsets"
"""The footer's entry of a shard at all offsets; a shard without it is at one."""

TAIL_ENTRY = "tail_samples"
"""The footer's entry of a shard whose last columns are drawn; a shard without it has none."""


@dataclass(frozen=True, slots=True, eq=False)
class KBestAtAllOffsets:
    """KBestAtAllOffsets: the low-rate frames of all three offsets, by their middle 10 ms frames.

    Row j has its middle at frame j + 1: it is row j // 3 of offset j % 3. F frames have F - 2 rows.
    """

    kbest: KBest

    @classmethod
    def of(cls, parts: Sequence[KBest]) -> "KBestAtAllOffsets":
        """Interleave the targets of offsets 0, 1 and 2 of one utterance."""
        columns = (
            [part.senones for part in parts],
            [part.logits for part in parts],
            [part.log_z for part in parts],
        )
        return cls(KBest(*map(_interleaved, columns), tail_samples=parts[0].tail_samples))

    def at(self, offset: int) -> KBest:
        """Return the targets of one offset: views, not copies."""
        return self.kbest.rows(slice(offset, None, STACK))


StoredKBest: TypeAlias = KBest | KBestAtAllOffsets
"""The soft targets of an utterance in a shard."""


@dataclass(frozen=True, slots=True)
class StoredForm:
    """StoredForm: what a footer states of its shard's soft targets, beside their bytes."""

    k: int
    tail_samples: int
    offsets: Offsets

    @classmethod
    def stated(cls, footer: Mapping[str, str]) -> "StoredForm":
        """Read the form from a footer."""
        k = stated_k(footer)
        return cls(k, stated_tail_samples(footer, k), stated_offsets(footer))


def _interleaved(columns: Sequence[np.ndarray]) -> np.ndarray:
    first = columns[0]
    rows = np.empty((sum(map(len, columns)), *first.shape[1:]), first.dtype)
    for offset, column in enumerate(columns):
        rows[offset::STACK] = column
    return rows


def stored_rows(targets: StoredKBest) -> KBest:
    """Return all rows that a shard holds of an utterance's soft targets."""
    return targets.kbest if isinstance(targets, KBestAtAllOffsets) else targets


def from_stored_rows(kbest: KBest, offsets: Offsets) -> StoredKBest:
    """Invert `stored_rows`."""
    return KBestAtAllOffsets(kbest) if offsets == "all" else kbest


def offsets_of(targets: StoredKBest) -> Offsets:
    """Return whether targets are at one offset or at all."""
    return "all" if isinstance(targets, KBestAtAllOffsets) else "one"


def num_stored_rows(num_frames: int, offset: int, offsets: Offsets) -> int:
    """Count the rows that `num_frames` 10 ms frames have, at `offset` or at all."""
    own = num_low_rate_frames(num_frames, offset)
    return own if offsets == "one" else max(0, num_frames - 2)


def footer_of(targets: Sequence[StoredKBest]) -> dict[str, str]:
    """Return the footer's entries: the k that all `targets` share, 0 for none, and their form.

    Drawn columns and all offsets have entries where there are some. ValueError for targets that
    differ in any of them.
    """
    ks = {stored_rows(each).senones.shape[1] for each in targets}
    if len(ks) > 1:
        raise ValueError(f"k = {sorted(ks)}: need one k for the whole shard")
    tails = {stored_rows(each).tail_samples for each in targets}
    if len(tails) > 1:
        raise ValueError(f"tail_samples = {sorted(tails)}: need one for the whole shard")
    kinds = {offsets_of(each) for each in targets}
    if len(kinds) > 1:
        raise ValueError("targets at one offset and at all: need one of them for the whole shard")
    entries = {"k": str(ks.pop() if ks else 0)}
    # Shards at one offset, and those without draws, keep the bytes that they had before.
    entries |= {TAIL_ENTRY: str(tails.pop())} if tails - {0} else {}
    return entries | ({OFFSETS_ENTRY: "all"} if kinds == {"all"} else {})


def stated_k(footer: Mapping[str, str]) -> int:
    """Read k from a footer."""
    text = footer.get("k", "")
    if not (text.isascii() and text.isdecimal() and len(text) <= 5):
        raise ValueError(f"footer entry k = {text!r}: need a count of senones")
    return int(text)


def stated_tail_samples(footer: Mapping[str, str], k: int) -> int:
    """Read from a footer how many of the k columns are drawn; 0 where it says nothing."""
    text = footer.get(TAIL_ENTRY)
    if text is None:
        return 0
    if not (text.isascii() and text.isdecimal() and len(text) <= 5 and int(text)):
        raise ValueError(f"footer entry {TAIL_ENTRY} = {text!r}: need a count of columns, or none")
    require_below_k(int(text), k)
    return int(text)


def stated_offsets(footer: Mapping[str, str]) -> Offsets:
    """Read from a footer whether targets are at one offset or at all."""
    text = footer.get(OFFSETS_ENTRY)
    if text not in (None, "all"):
        raise ValueError(f"footer entry {OFFSETS_ENTRY} = {text!r}: need 'all', or none")
    return "one" if text is None else "all"
