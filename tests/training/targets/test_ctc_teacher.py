"""The map from a CTC model's tokens to senones: its equation, its frame rates, its accuracy."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from training.targets.ctc_teacher import (
    LAGS,
    PSEUDO_COUNT,
    Example,
    SenoneMap,
    at_low_rate,
    ctc_teacher,
    estimate_map,
)

FRAMES_OF_SENONE = 3
SENONES_OF_TOKEN = 3
NUM_TOKENS = 9
NUM_SENONES = 1 + SENONES_OF_TOKEN * (NUM_TOKENS - 1)
"""Silence is senone 0, and blank token 0."""

CONFUSED = 0.05
"""The share of spikes at which the recognizer hears another token."""


def expected_logits(
    examples: list[Example], heard: Tensor, num_senones: int, scale: float
) -> np.ndarray:
    """The module's equation, frame by frame, token by token, lag by lag."""
    num_tokens, lags = heard.shape[1], range(-LAGS, LAGS + 1)
    counts = np.zeros((num_senones, num_tokens, len(lags)))
    frames = np.ones(num_senones)
    for posteriors, senones in examples:
        for t, senone in enumerate(senones.tolist()):
            frames[senone] += 1
            for number, lag in enumerate(lags):
                if 0 <= t + lag < len(posteriors):
                    counts[senone, :, number] += posteriors[t + lag].numpy()
    priors = frames / frames.sum()
    seen = counts.sum(axis=0)
    found = np.tile(np.log(priors), (len(heard), 1))
    for t in range(len(heard)):
        for number, lag in enumerate(lags):
            if not 0 <= t + lag < len(heard):
                continue
            for token in range(num_tokens):
                for senone, prior in enumerate(priors):
                    smoothed = counts[senone, token, number] + PSEUDO_COUNT * prior
                    given = smoothed / (seen[token, number] + PSEUDO_COUNT)
                    weight = scale * heard[t + lag, token].item()
                    found[t, senone] += weight * math.log(given / prior)
    return found


def test_logits_are_the_equation_of_the_module() -> None:
    """To the precision of float32; the second utterance is withheld, and counts nowhere."""
    generator = torch.Generator().manual_seed(3)
    lengths = (31, 9, 24)
    examples = [
        (
            torch.rand(length, 4, generator=generator),
            torch.randint(0, 5, (length,), generator=generator),
        )
        for length in lengths
    ]
    found, fit = estimate_map(examples, 5)
    heard = torch.rand(27, 4, generator=generator)
    expected = expected_logits([examples[0], examples[2]], heard, 5, fit.scale)
    np.testing.assert_allclose(found.logits(heard).numpy(), expected, atol=1e-4)
    assert (fit.counted_frames, fit.withheld_frames) == (31 + 24, 9)


@pytest.mark.parametrize("frame_ms", [20.0, 30.0, 40.0, 80.0])
def test_posteriors_are_interpolated_in_time(frame_ms: float) -> None:
    """What rises linearly with time is as large as the middle of the low-rate frame says."""
    num_frames = 40
    count = round(num_frames * 30 / frame_ms)
    times = (torch.arange(count) + 0.5) * frame_ms
    found = at_low_rate(times[:, None], num_frames, frame_ms)[:, 0]
    middles = 30 * torch.arange(num_frames) + 22.5
    inside = (middles >= times[0]) & (middles <= times[-1])
    torch.testing.assert_close(found[inside], middles[inside])
    assert inside.sum() >= num_frames - 3


@pytest.mark.parametrize(("stated", "true"), [(40.0, 80.0), (80.0, 40.0), (20.0, 40.0)])
def test_another_frame_rate_is_refused(stated: float, true: float) -> None:
    """By the half second of noise already that a device labels before its first batch."""
    num_frames = 16
    posteriors = torch.zeros(math.ceil(num_frames * 30 / true), 4)
    at_low_rate(posteriors, num_frames, true)
    with pytest.raises(ValueError, match=f"frame_ms = {stated:g} for 480 ms.*correct frame_ms"):
        at_low_rate(posteriors, num_frames, stated)
    with pytest.raises(ValueError, match=r"frame_ms = nan for 480 ms.*correct frame_ms"):
        at_low_rate(posteriors, num_frames, math.nan)


def test_posteriors_that_are_none_are_refused() -> None:
    """One NaN would be in all of the map; an utterance without a frame counts for nothing."""
    generator = np.random.default_rng(5)
    examples = [spoken(generator, 40.0) for _ in range(3)]
    empty = torch.zeros(0, NUM_TOKENS), torch.zeros(0, dtype=torch.int64)
    _, fit = estimate_map([empty, *examples], NUM_SENONES)
    assert fit.counted_frames + fit.withheld_frames == sum(len(each) for _, each in examples)
    examples[1][0][3] = math.nan
    with pytest.raises(ValueError, match="utterance 1 has posteriors that are not finite"):
        estimate_map(examples, NUM_SENONES)


def spoken(generator: np.random.Generator, frame_ms: float) -> Example:
    """Tokens of nine low-rate frames with pauses, and a peaky recognizer's posteriors of them.

    A spike is in the CTC frame that has the token's middle, and blank everywhere else.
    """
    senones: list[int] = []
    spikes: list[tuple[float, int]] = []
    for token in generator.integers(1, NUM_TOKENS, 12):
        senones += [0] * generator.integers(0, 6)
        length = FRAMES_OF_SENONE * SENONES_OF_TOKEN
        is_wrong = generator.random() < CONFUSED
        said = generator.integers(1, NUM_TOKENS) if is_wrong else token
        spikes.append((30 * (len(senones) + length / 2), int(said)))
        first = 1 + SENONES_OF_TOKEN * (token - 1)
        senones += np.repeat(first + np.arange(SENONES_OF_TOKEN), FRAMES_OF_SENONE).tolist()
    num_frames = len(senones)
    logits = torch.from_numpy(
        generator.normal(size=(round(30 * num_frames / frame_ms), NUM_TOKENS))
    )
    logits[:, 0] += 8
    for time, token in spikes:
        logits[int(time / frame_ms), token] += 16
    posteriors = at_low_rate(logits.softmax(dim=1).float(), num_frames, frame_ms)
    return posteriors, torch.tensor(senones)


@pytest.mark.parametrize("frame_ms", [20.0, 40.0, 80.0])
def test_a_peaky_recognizer_labels_nearly_as_well_as_its_frames_can(frame_ms: float) -> None:
    """On speech that was not counted, within 6 points of what confusions and rounding leave.

    Rounding to a CTC frame displaces a spike by a quarter of a frame on average, and with it a
    boundary for every three low-rate frames.
    """
    generator = np.random.default_rng(5)
    found, fit = estimate_map([spoken(generator, frame_ms) for _ in range(200)], NUM_SENONES)
    right = frames = prior = 0
    for posteriors, senones in (spoken(generator, frame_ms) for _ in range(20)):
        right += int((found.logits(posteriors).argmax(dim=1) == senones).sum())
        prior += int((senones == 0).sum())
        frames += len(senones)
    left = (1 - CONFUSED) * (1 - frame_ms / 4 / (30 * FRAMES_OF_SENONE))
    assert right / frames == pytest.approx(left, abs=0.06)
    assert prior / frames < 0.25
    assert fit.frame_accuracy == pytest.approx(right / frames, abs=0.03)
    assert 0.15 < fit.prior_accuracy < 0.3


def test_a_map_of_other_senones_is_refused(tmp_path) -> None:
    """Before any utterance is heard; what is no map at all, too."""
    path = tmp_path / "map.npz"
    device = torch.device("cpu")
    path.write_bytes(SenoneMap(torch.zeros(5), torch.zeros(5, 4, 2 * LAGS + 1)).to_bytes())
    with pytest.raises(ValueError, match="has 5 senones: need the run's 6: estimate it on this"):
        ctc_teacher(device, 6, "my:model", str(path), 40.0)
    path.write_bytes(b"no map")
    with pytest.raises(ValueError, match="are no state of megahour"):
        ctc_teacher(device, 5, "my:model", str(path), 40.0)


def test_a_stored_map_is_the_same_to_half_precision() -> None:
    """Priors exactly, evidence to float16."""
    generator = torch.Generator().manual_seed(0)
    stored = SenoneMap(
        torch.randn(5, generator=generator), torch.randn(5, 4, 21, generator=generator)
    )
    read = SenoneMap.from_bytes(stored.to_bytes())
    assert torch.equal(read.log_priors, stored.log_priors)
    torch.testing.assert_close(read.evidence, stored.evidence, rtol=1e-3, atol=0)
