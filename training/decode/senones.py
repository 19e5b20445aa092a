"""Map triphones to senones by a phonetic decision tree, and phone alignments to frames.

A phone has one state. An alignment gives the senone of every 10 ms frame.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from jaxtyping import Int32, Int64, UInt16

from infra.settings import printable
from pipeline.filterbank import STACK
from pipeline.settings import MAX_SENONES
from training.decode.lexicon import SILENCE_ID

Side = Literal["left", "right"]


@dataclass(frozen=True)
class Split:
    """Split leads to `inside` if the phone on `side` is one of `phones`, else to `outside`."""

    side: Side
    phones: frozenset[int]
    inside: "Node"
    outside: "Node"


Node = int | Split


@dataclass(frozen=True)
class SenoneTree:
    """SenoneTree has one root for each centre phone; leaves are senones 0..num_senones-1."""

    phones: tuple[str, ...]
    roots: tuple[Node, ...]

    def __post_init__(self) -> None:
        """Refuse a tree whose leaves are not the senones 0..n-1, each once."""
        if len(self.roots) != len(self.phones):
            raise ValueError(f"{len(self.roots)} roots: need {len(self.phones)}, one a phone")
        leaves = sorted(leaf for root in self.roots for leaf in _leaves(root))
        if leaves != list(range(len(leaves))) or len(leaves) > MAX_SENONES:
            raise ValueError(f"senones {leaves[:3]}...: need 0..n-1 once each, n <= {MAX_SENONES}")

    @cached_property
    def num_senones(self) -> int:
        """Return the number of leaves."""
        return sum(1 for root in self.roots for _ in _leaves(root))

    @cached_property
    def table(self) -> Int32[np.ndarray, "left centre right"]:
        """Return the senone of every triphone, seen or not, by phone ids."""
        num_phones = len(self.phones)
        # A tree answers for triphones that training never saw, so the table has all.
        table = np.empty((num_phones, num_phones, num_phones), dtype=np.int32)
        all_phones = np.ones(num_phones, dtype=bool)
        for centre, root in enumerate(self.roots):
            _fill(table[:, centre], root, {"left": all_phones, "right": all_phones})
        return table

    def senone(self, left: int, centre: int, right: int) -> int:
        """Return the senone of `centre` between `left` and `right`, all phone ids."""
        return int(self.table[left, centre, right])

    def to_json(self) -> str:
        """Write the tree as JSON text."""
        roots = [_to_table(root) for root in self.roots]
        return json.dumps({"phones": list(self.phones), "roots": roots}, ensure_ascii=False)


def parse_senone_tree(text: str) -> SenoneTree:
    """Read the JSON text that `to_json` writes; raise ValueError for other text."""
    try:
        fields = json.loads(text)
        phones = tuple(str(phone) for phone in fields["phones"])
        return SenoneTree(phones, tuple(_from_table(root, len(phones)) for root in fields["roots"]))
    except (json.JSONDecodeError, KeyError, TypeError, RecursionError, OverflowError) as error:
        said = printable(repr(error))
        raise ValueError(f"not a senone tree: {said}: need what to_json writes") from error


def _leaves(node: Node) -> Iterator[int]:
    if isinstance(node, int):
        yield node
    else:
        yield from _leaves(node.inside)
        yield from _leaves(node.outside)


def _fill(
    table: Int32[np.ndarray, "left right"], node: Node, region: dict[Side, np.ndarray]
) -> None:
    if isinstance(node, int):
        table[np.ix_(region["left"], region["right"])] = node
        return
    # A node's region is a rectangle of left and right contexts, which its question cuts.
    chosen = np.zeros(len(table), dtype=bool)
    chosen[sorted(node.phones)] = True
    _fill(table, node.inside, {**region, node.side: region[node.side] & chosen})
    _fill(table, node.outside, {**region, node.side: region[node.side] & ~chosen})


def _to_table(node: Node) -> object:
    if isinstance(node, int):
        return node
    return {
        "side": node.side,
        "phones": sorted(node.phones),
        "inside": _to_table(node.inside),
        "outside": _to_table(node.outside),
    }


def _from_table(fields: object, num_phones: int) -> Node:
    if isinstance(fields, int):
        return int(fields)
    if not isinstance(fields, dict) or fields["side"] not in ("left", "right"):
        raise ValueError(f"tree node {str(fields)[:80]}: need a senone or a split")
    phones = frozenset(fields["phones"])
    if not all(isinstance(phone, int) and 0 <= phone < num_phones for phone in phones):
        shown = printable(str(fields["phones"])[:80])
        raise ValueError(f"question {shown}: need phone ids 0..{num_phones - 1}")
    inside, outside = (_from_table(fields[branch], num_phones) for branch in ("inside", "outside"))
    return Split(fields["side"], phones, inside, outside)


NO_WORDS = "no words: need a transcript to align"


@dataclass(frozen=True, slots=True)
class Unaligned:
    """Unaligned says why an utterance has no alignment, as its ledger row does."""

    detail: str
    reason: Literal["alignment_failed", "unknown_word"] = "alignment_failed"


@dataclass(frozen=True)
class PhoneAlignment:
    """PhoneAlignment lists segments: phones (positions in Lexicon.phones), first 10 ms frames."""

    phones: Int32[np.ndarray, " segments"]
    starts: Int32[np.ndarray, " segments"]
    num_frames: int

    @property
    def durations(self) -> Int64[np.ndarray, " segments"]:
        """Return the number of frames in each segment."""
        return np.diff(self.starts, append=self.num_frames).astype(np.int64)

    @property
    def triphones(self) -> Int32[np.ndarray, "segments 3"]:
        """Return the left, centre and right phone of each segment; beyond the edges is silence."""
        # Triphones reach across words, and silence is a context as any phone is.
        padded = np.pad(self.phones, 1, constant_values=SILENCE_ID)
        return np.stack([padded[:-2], padded[1:-1], padded[2:]], axis=1)


def senone_alignment(alignment: PhoneAlignment, tree: SenoneTree) -> UInt16[np.ndarray, " frames"]:
    """Return the senone of every 10 ms frame: the tree's leaf for the frame's triphone."""
    left, centre, right = alignment.triphones.T
    return np.repeat(tree.table[left, centre, right], alignment.durations).astype(np.uint16)


def expand_to_frames(
    senones: Int64[np.ndarray, " low_rate_frames"], offset: int, num_frames: int
) -> UInt16[np.ndarray, " frames"]:
    """Repeat low-rate frames' senones for 10 ms frames; invert `alignment[offset + 1 :: 3]`.

    Frames before the offset take the first senone, frames after the last stack the last one.
    """
    # At 100 Hz the labels serve all three offsets, which training rotates.
    low_rate_frames = (np.arange(num_frames) - offset) // STACK
    return senones[np.clip(low_rate_frames, 0, len(senones) - 1)].astype(np.uint16)
