"""Pronounce words by their letters, as a lexicon's words are pronounced.

M. Bisani, H. Ney, "Joint-sequence models for grapheme-to-phoneme conversion", Speech Communication
50(5), 2008: a word and its pronunciation are one sequence of graphones, here a letter with none,
one or two phones each. Expectation maximization aligns the lexicon's letters and phones by a
unigram of graphones; an n-gram model of the most probable alignments, by Kneser and Ney, then
pronounces.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from training.decode.lexicon import Lexicon, Pronunciation
from training.decode.ngrams import END, START, BackoffModel, kneser_ney, ngram_keys

ORDER = 6
"""Graphones of the longest n-grams; longer ones have no fewer errors in held-out words."""

NUM_ITERATIONS = 10
_BEAM = 64  # histories that are kept at each letter
_MAX_LETTERS = 40
_PHONES_A_LETTER = 2
_SMALLEST = 1e-300


@dataclass(frozen=True, slots=True, eq=False)
class LetterToSound:
    """LetterToSound pronounces words of letters that the lexicon has.

    `graphones[g]` are the letter and the phones of word g of the n-gram model, `of_letter` the
    graphones of each letter.
    """

    model: BackoffModel
    graphones: tuple[tuple[str, Pronunciation], ...]
    of_letter: Mapping[str, np.ndarray]
    suffixes: np.ndarray
    keys: np.ndarray

    @classmethod
    def of(cls, lexicon: Lexicon) -> "LetterToSound":
        """Learn from the words of a lexicon that are no noises, with all their variants.

        ValueError if no word is short enough: of two phones a letter at most.
        """
        # Kaldi's <UNK> SPN and [noise] NSN have phones of their own.
        pairs = [
            (word, spelled)
            for word, variants in sorted(lexicon.pronunciations.items())
            for spelled in variants
            if not word.startswith(("<", "[", "!"))
            and len(spelled) <= _PHONES_A_LETTER * len(word) <= _PHONES_A_LETTER * _MAX_LETTERS
        ]
        if not pairs:
            raise ValueError("no word of the lexicon has two phones a letter at most: add others")
        sentences = align_letters(pairs)
        graphones = sorted(set(chain.from_iterable(sentences)))
        names = {graphone: f"{number:07d}" for number, graphone in enumerate(graphones)}
        named = [[names[graphone] for graphone in sentence] for sentence in sentences]
        model = kneser_ney(named, names.values(), ORDER)
        of_letter = defaultdict[str, list[int]](list)
        for number, (letter, _) in enumerate(graphones):  # </s> and <s> come after digits
            of_letter[letter].append(number)
        return cls(
            model,
            tuple(graphones),
            {letter: np.array(numbers) for letter, numbers in of_letter.items()},
            model.suffixes(),
            ngram_keys(model.ngrams["history"], model.ngrams["word"], len(model.words)),
        )

    def pronounce(self, word: str) -> Pronunciation:
        """Return the phones of the most probable graphones; none for letters never seen.

        Graphones without any phone pronounce no word.
        """
        if not word or not all(letter in self.of_letter for letter in word):
            return ()
        states, costs = np.array([1 + self.model.words.index(START)]), np.zeros(1)
        steps: list[tuple[np.ndarray, np.ndarray]] = []  # the place before, and the graphone
        for letter in word:
            graphones = self.of_letter[letter]
            places = np.repeat(np.arange(len(states)), len(graphones))
            chosen = np.tile(graphones, len(states))
            targets, log_probabilities = self._followed(states[places], chosen)
            costs = costs[places] - log_probabilities
            # The best way to each history, of which the best are kept.
            order = np.lexsort((costs, targets))
            order = order[np.unique(targets[order], return_index=True)[1]]
            order = order[np.argsort(costs[order], kind="stable")[:_BEAM]]
            states, costs = targets[order], costs[order]
            steps.append((places[order], chosen[order]))
        ends = np.full(len(states), self.model.words.index(END))
        place = int(np.argmin(costs - self._followed(states, ends)[1]))
        phones: list[str] = []
        for places, chosen in reversed(steps):
            phones[:0] = self.graphones[chosen[place]][1]
            place = int(places[place])
        return tuple(phones)

    def _followed(self, states: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return each history's successor by a word, and log10 of the word's probability."""
        ngrams, num_words = self.model.ngrams, len(self.model.words)
        targets, log_probabilities = np.zeros((2, len(states)))
        targets = targets.astype(np.int64)
        rows = np.arange(len(states))
        while len(rows):
            wanted = ngram_keys(states[rows], words[rows], num_words)
            found = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
            is_found = self.keys[found] == wanted
            ended = rows[is_found]
            targets[ended] = found[is_found]
            log_probabilities[ended] += ngrams["log_probability"][found[is_found]]
            rows = rows[~is_found]
            log_probabilities[rows] += ngrams["log_backoff"][states[rows]]
            states = states.copy()
            states[rows] = self.suffixes[states[rows]]
        is_longest = targets >= self.model.starts[self.model.order]
        return np.where(is_longest, self.suffixes[targets], targets), log_probabilities


Graphone = tuple[str, Pronunciation]


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """_Group: words of I letters and J phones, and the numbers of the graphones they may have.

    Of `taken[d]`, whose shape is (words, I, J + 1 - d), element (w, i, j) is letter i of word w
    with the d phones from j on.
    """

    members: np.ndarray
    taken: tuple[np.ndarray, ...]

    @classmethod
    def of(
        cls, members: np.ndarray, letters: np.ndarray, phones: np.ndarray, base: int
    ) -> "_Group":
        """Number the graphones; phones are numbered from 1, below `base`."""
        num_letters, num_phones = letters.shape[1], phones.shape[1]
        taken = []
        for num_taken in range(min(_PHONES_A_LETTER, num_phones) + 1):
            numbers = letters[:, :, None] + np.zeros(num_phones + 1 - num_taken, np.int64)
            for place in range(_PHONES_A_LETTER):
                numbers = numbers * base
                if place < num_taken:
                    last = num_phones + 1 - num_taken + place
                    numbers = numbers + phones[:, None, place:last]
            taken.append(np.broadcast_to(numbers, (len(members), num_letters, numbers.shape[2])))
        return cls(members, tuple(taken))

    def renumbered(self, occurring: np.ndarray) -> "_Group":
        """Number graphones by their places among those that occur, which are in order."""
        taken = (np.searchsorted(occurring, numbers).astype(np.int32) for numbers in self.taken)
        return _Group(self.members, tuple(taken))

    def posteriors(self, probabilities: np.ndarray) -> list[np.ndarray]:
        """Return each graphone's posterior probability in its word's alignment."""
        scores = [probabilities[numbers] for numbers in self.taken]
        num_words, num_letters, width = scores[0].shape
        forward = np.zeros((num_letters + 1, num_words, width))
        forward[0, :, 0] = 1
        backward = np.zeros((num_letters + 1, num_words, width))
        backward[num_letters, :, -1] = 1
        for letter in range(num_letters):
            for num_taken, score in enumerate(scores):
                stop = width - num_taken
                forward[letter + 1, :, num_taken:] += forward[letter, :, :stop] * score[:, letter]
        for letter in reversed(range(num_letters)):
            for num_taken, score in enumerate(scores):
                stop = width - num_taken
                backward[letter, :, :stop] += backward[letter + 1, :, num_taken:] * score[:, letter]
        totals = np.maximum(backward[0, :, 0], _SMALLEST)[:, None, None]
        return [
            forward[:-1, :, : width - num_taken].swapaxes(0, 1)
            * score
            * backward[1:, :, num_taken:].swapaxes(0, 1)
            / totals
            for num_taken, score in enumerate(scores)
        ]

    def best(self, probabilities: np.ndarray) -> np.ndarray:
        """Return how many phones each letter of each word has in the most probable alignment."""
        scores = [np.log(np.maximum(probabilities[numbers], _SMALLEST)) for numbers in self.taken]
        num_words, num_letters, width = scores[0].shape
        reached = np.full((num_words, width), -np.inf)
        reached[:, 0] = 0
        choices = np.zeros((num_letters, num_words, width), np.int64)
        for letter in range(num_letters):
            options = np.full((len(scores), num_words, width), -np.inf)
            for num_taken, score in enumerate(scores):
                stop = width - num_taken
                options[num_taken, :, num_taken:] = reached[:, :stop] + score[:, letter]
            choices[letter] = options.argmax(0)
            reached = options.max(0)
        found = np.zeros((num_words, num_letters), np.int64)
        places = np.full(num_words, width - 1)
        for letter in reversed(range(num_letters)):
            found[:, letter] = choices[letter, np.arange(num_words), places]
            places = places - found[:, letter]
        return found


def align_letters(pairs: Sequence[tuple[str, Pronunciation]]) -> list[list[Graphone]]:
    """Return the graphones of each word, by its most probable alignment after EM."""
    letters = _numbered(word for word, _ in pairs)
    phones = _numbered(spelled for _, spelled in pairs)
    base = len(phones) + 1
    by_shape = defaultdict[tuple[int, int], list[int]](list)
    for number, (word, spelled) in enumerate(pairs):
        by_shape[len(word), len(spelled)].append(number)
    groups = []
    for members in by_shape.values():
        words = np.array([[letters[each] for each in pairs[n][0]] for n in members])
        spoken = np.array([[phones[each] + 1 for each in pairs[n][1]] for n in members])
        groups.append(_Group.of(np.array(members), words, spoken, base))
    # Of all graphones few may occur: of 6,000 letters and 200 phones one in thousands.
    seen = [np.unique(numbers) for group in groups for numbers in group.taken]
    occurring = np.unique(np.concatenate(seen))
    groups = [group.renumbered(occurring) for group in groups]
    size = len(occurring)
    probabilities = np.ones(size)
    for _ in range(NUM_ITERATIONS):
        counts = np.zeros(size)
        for group in groups:
            for numbers, each in zip(group.taken, group.posteriors(probabilities), strict=True):
                counts += np.bincount(numbers.ravel(), each.ravel(), size)
        probabilities = counts / counts.sum()
    aligned: list[list[Graphone]] = [[] for _ in pairs]
    for group in groups:
        for number, taken in zip(
            group.members.tolist(), group.best(probabilities).tolist(), strict=True
        ):
            (word, spelled), place = pairs[number], 0
            for letter, num_taken in zip(word, taken, strict=True):
                aligned[number].append((letter, spelled[place : place + num_taken]))
                place += num_taken
    return aligned


def _numbered(sequences: Iterable[Iterable[str]]) -> dict[str, int]:
    return {each: n for n, each in enumerate(sorted(set(chain.from_iterable(sequences))))}
