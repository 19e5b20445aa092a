"""Find when the words of a decoded path were spoken, from the senone of every frame.

A decoding graph writes a word early or late, as determinization and phonetic context move its
label. The path's senones say more: they are those of the words' phones, in order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from training.decode.lexicon import SILENCE_ID, Lexicon
from training.decode.senones import SenoneTree

_END = -1
_SILENT = -1


class Span(NamedTuple):
    """Span is a word's first frame, and the frame after its last one."""

    start: int
    end: int


class _State(NamedTuple):
    """A phone of the transcript between the phone before it and the node after it."""

    node: int
    previous_phone: int
    next_node: int


@dataclass(frozen=True, slots=True)
class _Phones:
    """The phones of some words with optional silences: node n is `phones[n]` of `words[n]`."""

    phones: list[int] = field(default_factory=list)
    words: list[int] = field(default_factory=list)
    following: list[list[int]] = field(default_factory=list)

    def add(self, phone: int, word: int, following: list[int]) -> int:
        self.phones.append(phone)
        self.words.append(word)
        self.following.append(following)
        return len(self.phones) - 1

    def entered(self, node: int, previous_phone: int) -> Iterator[_State]:
        """Yield the states of a node, one for each node that may follow."""
        for next_node in self.following[node]:
            yield _State(node, previous_phone, next_node)

    def senone(self, state: _State, tree: SenoneTree) -> int:
        right = SILENCE_ID if state.next_node == _END else self.phones[state.next_node]
        return int(tree.table[state.previous_phone, self.phones[state.node], right])


def word_spans(
    senones: Int64[np.ndarray, " frames"], words: Sequence[str], lexicon: Lexicon, tree: SenoneTree
) -> list[Span]:
    """Return the frames of each word on a path of these senones.

    A search that ended within a word leaves frames that no whole transcript explains; then the
    words share the utterance evenly.
    """
    phones, firsts = _phones_of(words, lexicon)
    active = {state: state for node in firsts for state in phones.entered(node, SILENCE_ID)}
    trace: list[dict[_State, _State]] = []
    for number, senone in enumerate(senones.tolist()):
        reached: dict[_State, _State] = {}
        for state in active:
            moved = () if number == 0 else _after(state, phones)
            for new in (state, *moved):
                if phones.senone(new, tree) == senone:
                    reached.setdefault(new, state)
        trace.append(reached)
        active = reached
    ended = next((state for state in active if state.next_node == _END), None)
    if not trace or ended is None:
        return _even_spans(len(senones), len(words))
    return _spans(trace, ended, phones, len(words))


def _after(state: _State, phones: _Phones) -> Iterator[_State]:
    if state.next_node != _END:
        yield from phones.entered(state.next_node, phones.phones[state.node])


def _phones_of(words: Sequence[str], lexicon: Lexicon) -> tuple[_Phones, list[int]]:
    """Return the nodes of the words' phones, and those that may be first."""
    phones = _Phones()
    firsts = [_END]
    # From the last word back, so that what follows a phone is known.
    for number in reversed(range(len(words))):
        after_word = [*firsts, phones.add(SILENCE_ID, _SILENT, firsts)]
        firsts = []
        for pronunciation in lexicon.pronunciations[words[number]]:
            following = after_word
            for phone in reversed(pronunciation):
                following = [phones.add(lexicon.phone_ids[phone], number, following)]
            firsts += following
    return phones, [*firsts, phones.add(SILENCE_ID, _SILENT, firsts)] if words else []


def _spans(
    trace: list[dict[_State, _State]], state: _State, phones: _Phones, num_words: int
) -> list[Span]:
    spans: dict[int, Span] = {}
    for frame in reversed(range(len(trace))):
        word = phones.words[state.node]
        spans[word] = Span(frame, spans[word].end if word in spans else frame + 1)
        state = trace[frame][state]
    return [spans[word] for word in range(num_words)]


def _even_spans(num_frames: int, num_words: int) -> list[Span]:
    bounds = [num_frames * word // num_words for word in range(num_words + 1)] if num_words else []
    return [Span(start, end) for start, end in pairwise(bounds)]
