"""Alignment by a network: the same in batches as at once, in memory that the rows do not decide."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.filterbank import NUM_BINS
from pipeline.shards import FeatureRow
from tests.training.align.labelled_run import SENTENCES, row
from tests.training.decode.toy_language import toy_lexicon, toy_tree
from training.align import network_alignment
from training.align.network_alignment import length_batches, log_likelihoods, network_alignments
from training.decode.senones import SenoneTree, Unaligned
from training.models.lstm import LstmModel
from training.models.store import TrainedModel
from training.settings.models import LstmConfig

TREE, LEXICON = toy_tree(), toy_lexicon()


def network(num_senones: int = TREE.num_senones) -> TrainedModel:
    torch.manual_seed(3)
    config = LstmConfig(2, 24, bidirectional=False, look_ahead=3, dropout=0.0)
    model = LstmModel(config, num_senones).eval()
    return TrainedModel(model, torch.randn(num_senones))


def rows(num: int, longest: int) -> list[FeatureRow]:
    generator = np.random.default_rng(7)
    return [
        row(
            f"utterance-{number}",
            "speaker",
            generator.normal(size=(frames, NUM_BINS)).astype(np.float16),
            SENTENCES[number % len(SENTENCES)],
        )
        for number, frames in enumerate(generator.integers(90, longest, num).tolist())
    ]


def test_batches_change_no_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores differ by float32 rounding with the batch's size, and the senones not at all."""
    some, trained = rows(40, 400), network()
    at_once = log_likelihoods(some, trained, 0.3)
    alone = [log_likelihoods([each], trained, 0.3)[0] for each in some]
    for one, other in zip(at_once, alone, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    whole = network_alignments(some, trained, LEXICON, TREE, 0.3)
    monkeypatch.setattr(network_alignment, "MAX_PADDED_FRAMES", 500)
    batched = network_alignments(some, trained, LEXICON, TREE, 0.3)
    assert batched.keys() == whole.keys() == {each.utterance_id for each in some}
    for name, senones in whole.items():
        assert isinstance(senones, np.ndarray)
        np.testing.assert_array_equal(batched[name], senones)


@pytest.mark.parametrize("text", ["", None, "  "])
def test_an_empty_transcript_is_a_ledger_row(text: str | None) -> None:
    """The reason is the bootstrap's; the utterances beside it are aligned."""
    first, *others = rows(4, 200)
    found = network_alignments([replace(first, text=text), *others], network(), LEXICON, TREE, 0.3)
    assert found.pop(first.utterance_id) == Unaligned("no words: need a transcript to align")
    assert len(found) == 3
    assert all(isinstance(each, np.ndarray) for each in found.values())


@pytest.mark.parametrize(
    ("lengths", "batches"),
    [
        ([], []),
        ([5, 5], [[0, 1]]),
        ([5, 6], [[0], [1]]),
        ([4, 1, 2], [[1, 2], [0]]),
        ([30, 2, 2, 2, 2, 2, 2], [[1, 2, 3, 4, 5], [6], [0]]),
    ],
)
def test_lengths_are_batched(lengths: list[int], batches: list[list[int]]) -> None:
    """Padded to its longest a batch has ten frames at most; only one utterance alone has more."""
    assert length_batches(lengths, 10) == batches


def test_what_cannot_be_aligned_is_named() -> None:
    """An utterance with fewer frames than its words need has a reason in place of senones."""
    (long,) = rows(1, 400)
    short = replace(long, features=long.features[:6])
    some = [short, replace(long, utterance_id="u")]
    found = network_alignments(some, network(), LEXICON, TREE, 0.3)
    assert found[short.utterance_id] == Unaligned("2 frames: too few for the words to align")
    assert isinstance(found["u"], np.ndarray)


def test_an_unknown_word_is_named_or_is_spoken_noise() -> None:
    """Without spoken noise the utterance is left out; with it, it has the noise's senone."""
    (wasp,) = (replace(each, text="see wasp") for each in rows(1, 200))
    found = network_alignments([wasp], network(), LEXICON, TREE, 0.3)
    unknown = Unaligned("not in lexicon.txt: 'wasp'", "unknown_word")
    assert found == {wasp.utterance_id: unknown}
    noisy = LEXICON.with_spoken_noise()
    tree = SenoneTree(noisy.phones, tuple(range(len(noisy.phones))))
    found = network_alignments([wasp], network(tree.num_senones), noisy, tree, 0.3)
    senones = found[wasp.utterance_id]
    assert isinstance(senones, np.ndarray)
    spoken = [noisy.phones[each] for each in dict.fromkeys(senones.tolist())]
    assert [each for each in spoken if each != "SIL"] == ["S", "IY", "SPN"]


META = torch.device("meta")
NUM_SENONES = 4


@pytest.mark.parametrize("bidirectional", [False, True])
def test_only_scores_leave_the_models_device(
    monkeypatch: pytest.MonkeyPatch, bidirectional: bool
) -> None:
    """Features come to the device; an operation on tensors of two devices would fail."""
    config = LstmConfig(1, 8, bidirectional, look_ahead=0 if bidirectional else 2, dropout=0.0)
    model = LstmModel(config, NUM_SENONES).eval()
    trained = TrainedModel(model, torch.zeros(NUM_SENONES)).to(META)
    features = [np.ones((length, NUM_BINS), np.float16) for length in (30, 12)]
    rows = [row(f"u{n}", "s", each) for n, each in enumerate(features)]
    left = []

    def leave(values: torch.Tensor) -> torch.Tensor:
        if values.is_floating_point():  # not the indices of packing
            left.append(values.device)
        return torch.zeros(values.shape, dtype=values.dtype)

    monkeypatch.setattr(torch.Tensor, "cpu", leave)
    scores = log_likelihoods(rows, trained, 1.0)
    assert [each.shape for each in scores] == [(10, NUM_SENONES), (4, NUM_SENONES)]
    assert left == [META, META]
