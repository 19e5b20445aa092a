"""An exported LSTM that hears a stream in any pieces has the logits of whole utterances."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.filterbank import NUM_BINS
from pipeline.normalization import CausalMean, Moments
from pipeline.splicing import splice
from training.export.export_model import in_int8, require_exportable, streaming_graph
from training.export.recognizer import AcousticStream, StreamingModel
from training.models.lstm import LstmModel
from training.settings.models import ConformerConfig, LstmConfig

NUM_SENONES = 7
STUDENT = LstmConfig(2, 16, bidirectional=False, look_ahead=3, dropout=0.0)
FORMS = (
    STUDENT,
    LstmConfig(1, 8, bidirectional=False, look_ahead=0, dropout=0.0),
    LstmConfig(1, 8, bidirectional=False, look_ahead=3, dropout=0.0, num_filters=5),
)
LOUD = 1e3
"""Energies whose causal mean has digits that float32 loses."""


def student(config: LstmConfig = STUDENT) -> LstmModel:
    torch.manual_seed(3)
    model = LstmModel(config, NUM_SENONES).eval()
    frames = np.random.default_rng(1).normal(0, 3, size=(300, NUM_BINS)).astype(np.float16)
    model.freeze_normalization(Moments.of(frames))
    return model


def energies(num_frames: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.normal(LOUD, 3, size=(num_frames, NUM_BINS)).astype(np.float32)


def batch_logits(model: LstmModel, heard: np.ndarray, mean: CausalMean) -> np.ndarray:
    """Compute the logits as evaluation does, from features as extraction stores them."""
    features = mean.subtract(heard, np.float16)
    return model.utterance_logits([torch.from_numpy(splice(features, 0).astype(np.float32))])[
        0
    ].numpy()


MODELS = {config: student(config) for config in FORMS}
EXPORTED = {
    config: StreamingModel(streaming_graph(model).SerializeToString())
    for config, model in MODELS.items()
}


@settings(max_examples=40)
@given(
    config=st.sampled_from(FORMS),
    rows=st.lists(st.integers(0, 5), min_size=1, max_size=30),
    seed=st.integers(0, 9),
)
def test_any_pieces_have_the_logits_of_the_whole(
    config: LstmConfig, rows: list[int], seed: int
) -> None:
    """Pieces of 0 to 5 rows of 30 ms, down to one, differ from torch's batch by at most 1e-4."""
    heard = energies(3 * sum(rows), seed)
    stream = AcousticStream(EXPORTED[config], config.delay)
    edges = np.cumsum([0, *(3 * count for count in rows)])
    parts = [stream.accept(heard[a:b]) for a, b in pairwise(edges)]
    found = np.concatenate([*parts, stream.finish()])
    assert found.shape == (sum(rows), NUM_SENONES)
    if len(heard):
        expected = batch_logits(MODELS[config], heard, CausalMean())
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_the_second_utterance_keeps_the_causal_mean_and_forgets_the_rest() -> None:
    """Frames that made no row are in the mean too, as extraction's stream has them."""
    model, exported, mean = MODELS[STUDENT], EXPORTED[STUDENT], CausalMean()
    state = exported.start()
    for number, num_frames in enumerate((32, 23, 9)):
        heard = energies(num_frames, number)
        whole = num_frames // 3 * 3
        stream = AcousticStream(exported, STUDENT.delay, state)
        found = np.concatenate([stream.accept(heard[:whole]), stream.finish()])
        np.testing.assert_allclose(found, batch_logits(model, heard, mean), rtol=0, atol=1e-4)
        state = stream.state.next_utterance(heard[whole:])
    assert state.count.tolist() == [mean.count]
    np.testing.assert_array_equal(state.sum[0], mean.sum)  # float64, to the bit


def test_the_features_inside_are_those_of_extraction_to_the_bit() -> None:
    """The last spliced row, which is part of the state, has extraction's float16 values."""
    heard, state = energies(300), EXPORTED[STUDENT].start()
    stored = splice(CausalMean().subtract(heard, np.float16), 0)
    for row in range(100):
        state = EXPORTED[STUDENT].advance(heard[np.newaxis, 3 * row : 3 * row + 3], state)[1]
        np.testing.assert_array_equal(state.last_row[0], stored[row].astype(np.float32))


def test_without_a_mean_pieces_have_the_logits_of_the_whole() -> None:
    """The graph of a recipe with the mean "none" hears the energies themselves, in float16."""
    model = MODELS[STUDENT]
    exported = StreamingModel(streaming_graph(model, "none").SerializeToString())
    heard = np.random.default_rng(2).normal(4, 3, size=(60, NUM_BINS)).astype(np.float32)
    stream = AcousticStream(exported, STUDENT.delay)
    found = np.concatenate([stream.accept(heard[:21]), stream.accept(heard[21:]), stream.finish()])
    rows = torch.from_numpy(splice(heard.astype(np.float16), 0).astype(np.float32))
    np.testing.assert_allclose(found, model.utterance_logits([rows])[0].numpy(), rtol=0, atol=1e-4)
    causal = batch_logits(model, heard, CausalMean())
    assert np.abs(found - causal).max() > 0.1


def test_a_long_stream_needs_the_sum_in_float64() -> None:
    """After ten million frames (28 h) the mean is the exact one, which float32 misses by 0.05."""
    count = 10_000_000
    state = EXPORTED[STUDENT].start()
    total = np.full((1, NUM_BINS), count * LOUD + 0.25)
    heard = energies(3)
    begun = type(state)(np.array([count]), total, state.last_row, state.hidden, state.cell)
    after = EXPORTED[STUDENT].advance(heard[np.newaxis], begun)[1]
    mean = CausalMean(count, total[0].copy())
    expected = mean.subtract(heard, np.float16)
    np.testing.assert_array_equal(after.last_row[0], expected.reshape(-1).astype(np.float32))
    np.testing.assert_array_equal(after.sum[0], mean.sum)


def test_streams_beside_each_other_do_not_mix() -> None:
    """Three streams in one call have the logits that each has alone."""
    exported = EXPORTED[STUDENT]
    heard = np.stack([energies(12, seed) for seed in range(3)])
    together = exported.advance(heard, exported.start(3))[0]
    for number in range(3):
        alone = exported.advance(heard[number : number + 1], exported.start())[0]
        np.testing.assert_allclose(together[number], alone[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_filters", [0, 8])
def test_int8_is_near_float32_and_smaller(num_filters: int) -> None:
    """On any CPU: logits of rounded weights differ, by less than a fiftieth of their spread."""
    config = LstmConfig(2, 64, False, look_ahead=3, dropout=0.0, num_filters=num_filters)
    network = streaming_graph(student(config))
    data = in_int8(network)
    assert len(data) < 0.4 * len(network.SerializeToString())
    plain, rounded = StreamingModel(network.SerializeToString()), StreamingModel(data)
    heard = energies(90)[np.newaxis]
    expected = plain.advance(heard, plain.start())[0]
    found = rounded.advance(heard, rounded.start())[0]
    difference = np.abs(found - expected).max()
    assert 0 < difference < 0.02 * np.ptp(expected)


@pytest.mark.parametrize("num_frames", [1, 4, 0])
def test_frames_that_are_no_rows_are_refused(num_frames: int) -> None:
    """The graph hears whole rows; the message names the frames."""
    exported = EXPORTED[STUDENT]
    with pytest.raises(ValueError, match=rf"{num_frames} frames .* multiple of 3"):
        exported.advance(energies(num_frames)[np.newaxis], exported.start())


def test_models_without_explicit_state_are_refused() -> None:
    """A bidirectional teacher needs whole utterances; a Conformer is no LSTM."""
    teacher = LstmConfig(1, 8, bidirectional=True, look_ahead=0, dropout=0.0)
    with pytest.raises(ValueError, match=r"bidirectional: .* export the student"):
        require_exportable(teacher)
    with pytest.raises(ValueError, match='"conformer": need an LSTM'):
        require_exportable(ConformerConfig())
