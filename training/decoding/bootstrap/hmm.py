"""Make the bootstrap alignment by a monophone hidden Markov model, trained from a flat start.

Training is expectation maximization with Viterbi alignments, on all frames of a state at once. It
uses no random numbers: the same utterances give the same alignments.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float32, Int64

from infra.log_lines import progress_bar
from training.configuration.alignment import BootstrapConfig
from training.decoding.alignment import NO_WORDS, PhoneAlignment, TranscribedUtterance
from training.decoding.bootstrap.cepstra import speaker_cepstra
from training.decoding.bootstrap.mixtures import Mixture, log_likelihoods
from training.decoding.decoder import align
from training.decoding.graph.hclg import DecodingGraph, monophone_graph
from training.decoding.lexicon import SILENCE, Lexicon

STATES_PER_PHONE = 3


@dataclass(frozen=True)
class Bootstrap:
    """Bootstrap holds alignments by utterance id, and the reasons where there is none."""

    alignments: dict[str, PhoneAlignment]
    failures: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Example:
    frames: Float32[np.ndarray, "frames dimension"]
    graph: DecodingGraph


def bootstrap_alignment(
    utterances: Sequence[TranscribedUtterance], lexicon: Lexicon, config: BootstrapConfig
) -> Bootstrap:
    """Align transcribed utterances phone by phone, given only their transcripts and the lexicon.

    Raises ValueError for words that the lexicon lacks. Utterances without words, or with too few
    frames, are returned as failures.
    """
    for utterance in utterances:
        lexicon.require(lexicon.transcript(utterance.words))
    paths, failures = _flat_start(utterances, lexicon)
    cepstra = speaker_cepstra(utterances)
    examples = {
        utterance.utterance_id: _Example(
            cepstra[utterance.utterance_id],
            monophone_graph(lexicon, utterance.words, STATES_PER_PHONE),
        )
        for utterance in utterances
        if utterance.utterance_id in paths
    }
    if examples:
        paths = _train(examples, paths, len(lexicon.phones) * STATES_PER_PHONE, config)
    return Bootstrap({name: _phone_alignment(path) for name, path in paths.items()}, failures)


def _flat_start(
    utterances: Iterable[TranscribedUtterance], lexicon: Lexicon
) -> tuple[dict[str, Int64[np.ndarray, " frames"]], dict[str, str]]:
    """Spread each utterance's states evenly over its frames, with silence at both edges."""
    paths, failures = {}, {}
    for utterance in utterances:
        states = _first_states(utterance.words, lexicon)
        num_frames = len(utterance.features)
        if not utterance.words:
            failures[utterance.utterance_id] = NO_WORDS
        elif num_frames < len(states):
            failures[utterance.utterance_id] = f"{num_frames} frames: need {len(states)}"
        else:
            # Flat start, Kaldi's align-equal: each state has an equal share of the frames.
            evenly = np.arange(num_frames) * len(states) // num_frames
            paths[utterance.utterance_id] = states[evenly]
    return paths, failures


def _first_states(words: Sequence[str], lexicon: Lexicon) -> Int64[np.ndarray, " states"]:
    spelled = [lexicon.spoken(word)[0] for word in lexicon.transcript(words)]
    spoken = [phone for pronunciation in spelled for phone in pronunciation]
    phones = np.array([lexicon.phone_ids[phone] for phone in (SILENCE, *spoken, SILENCE)])
    return (phones[:, np.newaxis] * STATES_PER_PHONE + np.arange(STATES_PER_PHONE)).ravel()


def _train(
    examples: Mapping[str, _Example],
    paths: dict[str, Int64[np.ndarray, " frames"]],
    num_states: int,
    config: BootstrapConfig,
) -> dict[str, Int64[np.ndarray, " frames"]]:
    frames = np.concatenate([example.frames for example in examples.values()])
    mixtures = [Mixture.standard(frames.shape[1])] * num_states
    passes = range(config.num_iterations)
    for iteration in progress_bar(passes, description="bootstrap alignment", unit="pass"):
        # The Gaussians of a state may double every second iteration.
        max_gaussians = min(config.max_gaussians, 1 << (iteration // 2))
        states = np.concatenate([paths[name] for name in examples])
        mixtures = _reestimated(mixtures, frames, states, max_gaussians, config)
        # Viterbi: the new path assigns each frame to a state for the next iteration.
        paths = {
            name: align(example.graph, log_likelihoods(example.frames, mixtures))
            for name, example in examples.items()
        }
    return paths


def _reestimated(
    mixtures: Sequence[Mixture],
    frames: Float32[np.ndarray, "frames dimension"],
    states: Int64[np.ndarray, " frames"],
    max_gaussians: int,
    config: BootstrapConfig,
) -> list[Mixture]:
    """Split Gaussians, and take two EM steps of each state's mixture on the state's frames."""
    updated = []
    for state, mixture in enumerate(mixtures):
        own = frames[states == state]
        # More Gaussians than the frames support would model single utterances.
        affordable = len(own) // config.min_frames_per_gaussian
        larger = mixture.split(min(max_gaussians, affordable))
        updated.append(larger.reestimate(own).reestimate(own) if len(own) else mixture)
    return updated


def _phone_alignment(path: Int64[np.ndarray, " frames"]) -> PhoneAlignment:
    """Return the phone segments of a path of states: one begins where a first state is entered."""
    # Of two equal phones in a row, the second begins where state 0 follows state 2.
    entered = np.diff(path, prepend=-1) != 0
    starts = np.flatnonzero(entered & (path % STATES_PER_PHONE == 0))
    phones = path[starts] // STATES_PER_PHONE
    return PhoneAlignment(phones.astype(np.int32), starts.astype(np.int32), len(path))
