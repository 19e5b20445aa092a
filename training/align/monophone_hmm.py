"""Align transcripts by a monophone hidden Markov model, trained from a flat start.

Training is expectation maximization with Viterbi alignments, on all frames of a state at once. It
uses no random numbers: the same utterances give the same alignments. States have mixtures of
diagonal Gaussians over cepstra with deltas. The feature shards hold no audio; a cosine transform of
their log-mel energies gives the cepstra.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32, Float64, Int64
from scipy.fft import dct

from infra.log_lines import progress_bar
from pipeline.shards import FeatureRow
from training.decode.decoder import align
from training.decode.graph import monophone_graph
from training.decode.lexicon import SILENCE, Lexicon
from training.decode.senones import NO_WORDS, PhoneAlignment, Unaligned
from training.settings.decoding import BootstrapConfig

VARIANCE_FLOOR = 0.01  # of cepstra with variance 1
SPLIT_DISTANCE = 0.2  # standard deviations, as HTK's
MIN_FRAMES = 2.0  # a Gaussian with fewer keeps its mean and variance

TRAINING_BEAM = 500.0
"""In a training pass, how many nats a path may be behind the best; later alignment is exact.

Of 44,000 frames of LibriSpeech none changes at 100 already, with the first pass's monophones and
with the last's; at 500 a search takes 2.3 us a frame with the last's, and 21.9 without a beam.
"""

_NO_WEIGHT = 1e-300  # 0 beside another Gaussian's in single precision; its logarithm is finite
_BLOCK_FRAMES = 256  # 1 MB of 123 states of 8 Gaussians: near a core's cache


@dataclass(frozen=True)
class Mixture:
    """Mixture holds one state's Gaussians."""

    weights: Float64[np.ndarray, " gaussians"]
    means: Float64[np.ndarray, "gaussians dimension"]
    variances: Float64[np.ndarray, "gaussians dimension"]

    @classmethod
    def standard(cls, dimension: int) -> "Mixture":
        """Return one Gaussian of mean 0 and variance 1."""
        return cls(np.ones(1), np.zeros((1, dimension)), np.ones((1, dimension)))

    def split(self, num_gaussians: int) -> "Mixture":
        """Split the heaviest Gaussians, one after the other, until there are `num_gaussians`."""
        weights, means, variances = self.weights, self.means, self.variances
        while len(weights) < num_gaussians:
            heaviest = int(np.argmax(weights))
            shift = SPLIT_DISTANCE * np.sqrt(variances[heaviest])
            weights = np.append(weights, weights[heaviest] / 2)
            weights[heaviest] /= 2
            means = np.vstack([means, means[heaviest] + shift])
            means[heaviest] -= shift
            variances = np.vstack([variances, variances[heaviest]])
        return Mixture(weights, means, variances)

    def reestimate(self, frames: Float32[np.ndarray, "frames dimension"]) -> "Mixture":
        """Take one step of expectation maximization; a Gaussian with too few frames is kept."""
        # Expectation: the posterior of each Gaussian for each frame.
        form, constants = _log_density_form(self)
        joint = form @ _with_squares(frames) + constants
        joint -= joint.max(axis=0)
        posteriors = np.exp(joint)
        posteriors /= posteriors.sum(axis=0)
        # Maximization: weighted counts, means and variances.
        counts = posteriors.sum(axis=1, dtype=np.float64)
        divisor = np.maximum(counts, 1e-9)[:, np.newaxis]
        means = (posteriors @ frames) / divisor
        variances = (posteriors @ frames**2) / divisor - means**2
        usable = (counts >= MIN_FRAMES)[:, np.newaxis]
        weights = np.maximum(counts, 1.0)
        return Mixture(
            weights / weights.sum(),
            np.where(usable, means, self.means),
            np.where(usable, np.maximum(variances, VARIANCE_FLOOR), self.variances),
        )


def _log_density_form(
    mixture: Mixture,
) -> tuple[Float32[np.ndarray, "gaussians twice"], Float32[np.ndarray, "gaussians 1"]]:
    """Return A and b, where A (x, x^2) + b is log(weight x density) of each Gaussian at x."""
    precisions = 1 / mixture.variances
    constants = np.log(mixture.weights) - 0.5 * (
        np.log(2 * np.pi * mixture.variances) + mixture.means**2 * precisions
    ).sum(axis=1)
    form = np.concatenate([mixture.means * precisions, -0.5 * precisions], axis=1)
    return form.astype(np.float32), constants.astype(np.float32)[:, np.newaxis]


def _with_squares(
    frames: Float32[np.ndarray, "frames dimension"],
) -> Float32[np.ndarray, "twice frames"]:
    return np.concatenate([frames, frames**2], axis=1).T


def log_likelihoods(
    frames: Float32[np.ndarray, "frames dimension"], mixtures: Sequence[Mixture]
) -> Float32[np.ndarray, "frames states"]:
    """Return the log-likelihood of every frame in every state."""
    joined = Mixture(
        np.concatenate([mixture.weights for mixture in mixtures]),
        np.concatenate([mixture.means for mixture in mixtures]),
        np.concatenate([mixture.variances for mixture in mixtures]),
    )
    sizes = np.array([len(mixture.weights) for mixture in mixtures])
    # Row g has Gaussian g of every state: sums over rows take a third of the time of sums over
    # parts of one axis (9 us a frame of 123 states of 8 Gaussians, for 25). A state with fewer has
    # its first one again.
    rows = np.arange(sizes.max())[:, np.newaxis]
    chosen = (np.cumsum(sizes) - sizes + np.where(rows < sizes, rows, 0)).ravel()
    weights = np.where((rows < sizes).ravel(), joined.weights[chosen], _NO_WEIGHT)
    stacked = Mixture(weights, joined.means[chosen], joined.variances[chosen])
    form, constants = _log_density_form(stacked)
    totals = np.empty((len(frames), len(mixtures)), np.float32)
    for first in range(0, len(frames), _BLOCK_FRAMES):
        block = slice(first, first + _BLOCK_FRAMES)
        joint = form @ _with_squares(frames[block])
        joint += constants
        joint = joint.reshape(len(rows), len(mixtures), -1)
        largest = joint.max(axis=0)
        joint -= largest
        np.exp(joint, out=joint)
        totals[block] = (largest + np.log(joint.sum(axis=0))).T
    return totals


NUM_CEPSTRA = 13
MIN_STANDARD_DEVIATION = 0.01


def cepstra(energies: Float[np.ndarray, "frames bins"]) -> Float32[np.ndarray, "frames 39"]:
    """Compute the first 13 cepstral coefficients with first and second derivatives."""
    # The cosine transform decorrelates neighbouring bins, as diagonal Gaussians assume.
    static = dct(energies.astype(np.float64), axis=1, norm="ortho")[:, :NUM_CEPSTRA]
    first = _derivative(static)
    return np.concatenate([static, first, _derivative(first)], axis=1).astype(np.float32)


def _derivative(
    values: Float[np.ndarray, "frames coefficients"],
) -> Float[np.ndarray, "frames coefficients"]:
    # Linear regression over two frames on each side: sum_k k (c[t+k] - c[t-k]) / (2 sum_k k^2).
    padded = np.pad(values, ((2, 2), (0, 0)), mode="edge")
    near, far = padded[3:-1] - padded[1:-3], padded[4:] - padded[:-4]
    derivative: Float[np.ndarray, "frames coefficients"] = (near + 2 * far) / 10
    return derivative


def speaker_cepstra(
    utterances: Iterable[FeatureRow],
) -> dict[str, Float32[np.ndarray, "frames 39"]]:
    """Return cepstra by utterance id, with each speaker's mean 0 and standard deviation 1."""
    by_speaker: dict[str, dict[str, Float32[np.ndarray, "frames 39"]]] = {}
    for utterance in utterances:
        own = by_speaker.setdefault(utterance.speaker_id, {})
        own[utterance.utterance_id] = cepstra(utterance.features)
    normalized = {}
    for spoken in by_speaker.values():
        # Energies still vary with the causal mean, so all of a speaker's utterances are pooled.
        frames = np.concatenate(list(spoken.values())).astype(np.float64)
        mean = frames.mean(axis=0)
        deviation = np.maximum(frames.std(axis=0), MIN_STANDARD_DEVIATION)
        for utterance_id, values in spoken.items():
            normalized[utterance_id] = ((values - mean) / deviation).astype(np.float32)
    return normalized


STATES_PER_PHONE = 3


@dataclass(frozen=True)
class Monophones:
    """Monophones holds the Gaussians of each state; state k of phone p has place 3 p + k."""

    mixtures: tuple[Mixture, ...]

    def align(
        self,
        utterance: FeatureRow,
        cepstra: Float32[np.ndarray, "frames dimension"],
        lexicon: Lexicon,
    ) -> PhoneAlignment | Unaligned:
        """Align an utterance phone by phone, or say why it cannot be.

        Raises ValueError for words that the lexicon lacks.
        """
        flat = _flat_start(utterance, lexicon)
        if isinstance(flat, Unaligned):
            return flat
        graph = monophone_graph(lexicon, utterance.words, STATES_PER_PHONE)
        return _phone_alignment(align(graph, log_likelihoods(cepstra, self.mixtures)))

    def to_state(self) -> dict[str, np.ndarray]:
        """Return arrays that hold the mixtures, joined."""
        joined = {
            name: np.concatenate([getattr(each, name) for each in self.mixtures])
            for name in ("weights", "means", "variances")
        }
        return {"sizes": np.array([len(each.weights) for each in self.mixtures]), **joined}

    @classmethod
    def from_state(cls, state: Mapping[str, np.ndarray]) -> "Monophones":
        """Invert `to_state`."""
        ends = np.cumsum(state["sizes"])[:-1]
        parts = (np.split(state[name], ends) for name in ("weights", "means", "variances"))
        return cls(tuple(Mixture(*of_state) for of_state in zip(*parts, strict=True)))


@dataclass(frozen=True)
class TrainedMonophones:
    """TrainedMonophones holds monophones, and the state of every frame that they learned from."""

    monophones: Monophones
    paths: dict[str, Int64[np.ndarray, " _frames"]]


def train_monophones(
    utterances: Sequence[FeatureRow],
    cepstra: Mapping[str, Float32[np.ndarray, "_frames dimension"]],
    lexicon: Lexicon,
    config: BootstrapConfig,
) -> TrainedMonophones:
    """Train on transcribed utterances and their cepstra, given the lexicon alone.

    Utterances without words, or with too few frames, are passed over. ValueError for words that
    the lexicon lacks, or if no utterance remains.
    """
    for utterance in utterances:
        lexicon.require(lexicon.transcript(utterance.words))
    paths, graphs, why = {}, {}, NO_WORDS
    for utterance in utterances:
        flat = _flat_start(utterance, lexicon)
        if isinstance(flat, Unaligned):
            why = flat.detail
            continue
        paths[utterance.utterance_id] = flat
        graph = monophone_graph(lexicon, utterance.words, STATES_PER_PHONE)
        graphs[utterance.utterance_id] = graph
    if not graphs:
        raise ValueError(f"none of {len(utterances)} utterances can be aligned, such as: {why}")
    frames = np.concatenate([cepstra[name] for name in graphs])
    num_states = len(lexicon.phones) * STATES_PER_PHONE
    mixtures = [Mixture.standard(frames.shape[1])] * num_states
    passes = range(config.num_iterations)
    for iteration in progress_bar(passes, description="bootstrap alignment", unit="pass"):
        # The Gaussians of a state may double every second iteration.
        max_gaussians = min(config.max_gaussians, 1 << (iteration // 2))
        states = np.concatenate([paths[name] for name in graphs])
        for state in range(num_states):
            own = frames[states == state]
            if not len(own):
                continue
            # More Gaussians than the frames support would model single utterances.
            affordable = len(own) // config.min_frames_per_gaussian
            larger = mixtures[state].split(min(max_gaussians, affordable))
            mixtures[state] = larger.reestimate(own).reestimate(own)
        # Viterbi: the new path assigns each frame to a state for the next iteration.
        paths = {
            name: align(graph, log_likelihoods(cepstra[name], mixtures), TRAINING_BEAM)
            for name, graph in graphs.items()
        }
    return TrainedMonophones(Monophones(tuple(mixtures)), paths)


def _flat_start(
    utterance: FeatureRow, lexicon: Lexicon
) -> Int64[np.ndarray, " frames"] | Unaligned:
    """Spread an utterance's states evenly over its frames, with silence at both edges."""
    if not utterance.words:
        return Unaligned(NO_WORDS)
    spelled = [lexicon.spoken(word)[0] for word in lexicon.transcript(utterance.words)]
    spoken = [phone for pronunciation in spelled for phone in pronunciation]
    phones = np.array([lexicon.phone_ids[phone] for phone in (SILENCE, *spoken, SILENCE)])
    states = (phones[:, np.newaxis] * STATES_PER_PHONE + np.arange(STATES_PER_PHONE)).ravel()
    num_frames = len(utterance.features)
    if num_frames < len(states):
        return Unaligned(f"{num_frames} frames: need {len(states)}")
    # Flat start, Kaldi's align-equal: each state has an equal share of the frames.
    evenly: Int64[np.ndarray, " frames"]
    evenly = states[np.arange(num_frames) * len(states) // num_frames]
    return evenly


def _phone_alignment(path: Int64[np.ndarray, " frames"]) -> PhoneAlignment:
    """Return the phone segments of a path of states: one begins where a first state is entered."""
    # Of two equal phones in a row, the second begins where state 0 follows state 2.
    entered = np.diff(path, prepend=-1) != 0
    starts = np.flatnonzero(entered & (path % STATES_PER_PHONE == 0))
    phones = path[starts] // STATES_PER_PHONE
    return PhoneAlignment(phones.astype(np.int32), starts.astype(np.int32), len(path))
