"""A CTC recognizer as the teacher: its tokens' posteriors, mapped to the run's senones.

A CTC model says which token was spoken, mostly in one frame, and blank in all others. So what it
says in the frames around low-rate frame t decides the senone there. The tokens around t are taken
for independent witnesses of senone s, as in naive Bayes:

    log P(s | t) = log P(s) + a sum_d sum_v p[t + d, v] log(P(s | v, d) / P(s)) + constant
    P(s | v, d) = (sum_t p[t + d, v] [s_t = s] + m P(s)) / (sum_t p[t + d, v] + m)

p are the CTC posteriors at 30 ms, and zero outside the utterance; d runs over 10 frames on either
side; s_t is the labelled data's alignment. Blank is a token like the others. The witnesses are not
independent: `a` < 1 says how much they count, and is chosen by cross-entropy on utterances that are
not counted.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64, UInt16
from torch import Tensor
from torch.nn import functional

from infra.log_lines import log
from infra.settings import ConfigurationError
from infra.store.object_store import ObjectStore, join_uri
from pipeline.kbest import TeacherFailure
from pipeline.runs.manifest import read_manifest, read_output
from pipeline.runs.names import ALIGNMENT_STEP, CORPUS_FOLDER, LABELLED, features_step
from pipeline.shards import Alignment, read_features, read_partition
from pipeline.splicing import low_rate_alignment
from pipeline.steps.audio_source import AudioSource
from pipeline.steps.targets import SAMPLES_PER_FRAME
from training.align.labelled import read_tree
from training.entry_point import EntryPoint
from training.settings.recipe import read_recipe
from training.targets.own_teacher import hears
from training.tensor_encoding import decode_state, encode_state

LAGS = 10
"""The low-rate frames on either side whose tokens count: 300 ms."""

PSEUDO_COUNT = 2.0
"""m: the frames that a token at a lag is taken to have seen beside those counted."""

SCALES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0)
"""The values of `a` to choose from."""

WITHHELD_ONE_IN = 10
MAX_WITHHELD_FRAMES = 20_000
"""Bounds on the utterances that are not counted; 10 minutes of 1,025 tokens are 82 MB."""

FRAME_MS = 30.0
MIDDLE_MS = 22.5
"""The middle of the 45 ms that a low-rate frame's features are of."""

EDGE_MS = 100.0
"""Besides one frame, by how much the frames of a CTC model may exceed its audio or fall short."""

Posteriors = Callable[[list[Tensor]], list[Tensor]]
"""Audio (samples,) to logits or log-posteriors (CTC frames, tokens), for each utterance."""


def at_low_rate(
    posteriors: Float[Tensor, "ctc_frames tokens"], num_frames: int, frame_ms: float
) -> Float[Tensor, "num_frames tokens"]:
    """Interpolate linearly at the middles of the low-rate frames; outside, posteriors are zero."""
    # NaN is refused, too.
    if not (
        frame_ms > 0
        and abs(len(posteriors) * frame_ms - num_frames * FRAME_MS) <= EDGE_MS + frame_ms
    ):
        raise ValueError(
            f"{len(posteriors)} CTC frames of frame_ms = {frame_ms:g} for "
            f"{num_frames * FRAME_MS:g} ms of audio: need as many as it has, within "
            f"{EDGE_MS + frame_ms:g} ms: correct frame_ms"
        )
    padded = functional.pad(posteriors, (0, 0, 1, 1))
    middles = FRAME_MS * torch.arange(num_frames, device=posteriors.device) + MIDDLE_MS
    place = middles / frame_ms - 0.5
    before = place.floor()
    share = (place - before)[:, None]
    first, second = ((before + step).long().clamp(0, len(padded) - 1) for step in (1, 2))
    return (1 - share) * padded[first] + share * padded[second]


@dataclass(frozen=True, slots=True, eq=False)
class SenoneMap:
    """SenoneMap: log P(s), and of each token at each lag a log(P(s | v, d) / P(s))."""

    log_priors: Float32[Tensor, " senones"]
    evidence: Float32[Tensor, "senones tokens lags"]

    def logits(self, posteriors: Float[Tensor, "frames tokens"]) -> Float32[Tensor, "_f senones"]:
        """Return log P(s | t) up to a constant, of posteriors at 30 ms."""
        summed = functional.conv1d(posteriors.float().mT[None], self.evidence, padding=LAGS)
        return self.log_priors + summed[0].mT

    def to(self, device: torch.device) -> "SenoneMap":
        """Copy the map to a device."""
        return SenoneMap(self.log_priors.to(device), self.evidence.to(device))

    def to_bytes(self) -> bytes:
        """Encode the map, evidence in half precision: 134 MB for 3,183 senones, 1,000 tokens."""
        return encode_state({"log_priors": self.log_priors, "evidence": self.evidence.half()})

    @classmethod
    def from_bytes(cls, data: bytes) -> "SenoneMap":
        """Invert `to_bytes`; ValueError for other bytes."""
        match decode_state(data):
            case {"log_priors": Tensor() as log_priors, "evidence": Tensor() as evidence}:
                return cls(log_priors.float(), evidence.float())
        raise ValueError("no log_priors and evidence: need a map that `estimate` wrote")


@dataclass(frozen=True, slots=True)
class Fit:
    """Fit says how well a map knows the senones of the utterances that were not counted.

    `prior_accuracy` is the share of the most frequent senone: what is right without hearing.
    """

    frame_accuracy: float
    prior_accuracy: float
    cross_entropy: float
    scale: float
    counted_frames: int
    withheld_frames: int


Example = tuple[Float[Tensor, "frames tokens"], Int64[Tensor, " frames"]]
"""An utterance's CTC posteriors at 30 ms, and the senones of its alignment."""


def estimate_map(examples: Iterable[Example], num_senones: int) -> tuple[SenoneMap, Fit]:
    """Count tokens at lags beside senones, and choose the scale.

    The counts take senones x tokens x 21 x 8 bytes, and as much again while they become logarithms.
    """
    withheld: list[Example] = []
    counts: Tensor | None = None
    # In float32 a cell would stop at 2**24 frames: 140 hours of silence.
    frames = torch.zeros(num_senones, dtype=torch.float64)
    for number, (posteriors, senones) in enumerate(examples):
        if not posteriors.isfinite().all():
            raise ValueError(f"utterance {number} has posteriors that are not finite")
        if not len(senones):
            continue
        num_withheld = sum(len(each) for _, each in withheld)
        if number % WITHHELD_ONE_IN == 1 and num_withheld < MAX_WITHHELD_FRAMES:
            withheld.append((posteriors, senones))
            continue
        around = functional.pad(posteriors, (0, 0, LAGS, LAGS)).unfold(0, 2 * LAGS + 1, 1)
        if counts is None:
            counts = torch.zeros(num_senones, *around.shape[1:], dtype=torch.float64)
        counts.index_add_(0, senones, around.double())
        frames += torch.bincount(senones, minlength=num_senones)
    if counts is None or not withheld:
        raise ValueError(
            "fewer than 2 aligned utterances: need some that count, and one that tests"
        )
    priors = (frames + 1) / (frames + 1).sum()
    seen = counts.sum(dim=0)
    counts += PSEUDO_COUNT * priors[:, None, None]
    evidence = (counts / (seen + PSEUDO_COUNT)).div_(priors[:, None, None]).log_().float()
    log_priors = priors.log().float()
    unscaled = SenoneMap(torch.zeros(num_senones), evidence)
    found = torch.cat([unscaled.logits(posteriors) for posteriors, _ in withheld])
    truth = torch.cat([senones for _, senones in withheld])
    losses = {
        scale: functional.cross_entropy(log_priors + scale * found, truth).item()
        for scale in SCALES
    }
    scale = min(losses, key=losses.__getitem__)
    best = (log_priors + scale * found).argmax(dim=1)
    fit = Fit(
        frame_accuracy=(best == truth).double().mean().item(),
        prior_accuracy=(truth == priors.argmax()).double().mean().item(),
        cross_entropy=losses[scale],
        scale=scale,
        counted_frames=int(frames.sum()),
        withheld_frames=len(truth),
    )
    return SenoneMap(log_priors, scale * evidence), fit


@hears("audio")
def ctc_teacher(
    device: torch.device, num_senones: int, posteriors: str, senone_map: str, frame_ms: float
) -> Callable[[list[Tensor]], list[Tensor]]:
    """Make a teacher of a CTC model: a factory for `[targets.teacher]`.

    `posteriors` names a function of yours, "module:function", that takes `device` and returns
    `Posteriors`. `senone_map` is the file that `estimate` wrote, and `frame_ms` the model's rate.
    """
    loaded = SenoneMap.from_bytes(Path(senone_map).read_bytes()).to(device)
    if len(loaded.log_priors) != num_senones:
        raise ValueError(
            f"{senone_map} has {len(loaded.log_priors)} senones: need the run's {num_senones}: "
            "estimate it on this run"
        )
    hear = _at_low_rate(posteriors, device, frame_ms)
    return lambda utterances: [loaded.logits(each) for each in hear(utterances)]


def _at_low_rate(factory: str, device: torch.device, frame_ms: float) -> Posteriors:
    """Make the user's function; return one whose answers are posteriors at 30 ms."""
    function: Posteriors = EntryPoint(factory, {}, ("device",)).call(device=device)

    def hear(utterances: list[Tensor]) -> list[Tensor]:
        return [
            at_low_rate(answer.to(device).float().softmax(dim=-1), num_frames, frame_ms)
            for answer, num_frames in zip(
                function(utterances),
                (len(samples) // SAMPLES_PER_FRAME for samples in utterances),
                strict=True,
            )
        ]

    return hear


def estimate(
    recipe_path: str, run_uri: str, device: str = "cpu", overrides: Sequence[str] = ()
) -> dict[str, Fit]:
    """Estimate the map of each `ctc_teacher` of a recipe, and write its `senone_map`.

    The run has its final alignment. All aligned utterances are heard, at offset 0; those whose
    audio is gone are left out. Returns how well each map fits, by its file.
    """
    recipe = read_recipe(recipe_path, overrides)
    corpus_uri = recipe.corpus.uri or join_uri(run_uri, CORPUS_FOLDER)
    store = ObjectStore((run_uri, corpus_uri, *recipe.corpus.audio_prefixes))
    audio = AudioSource(store, corpus_uri, recipe.features.conversion)
    num_senones = read_tree(store, run_uri).num_senones
    fits = {}
    for member in recipe.targets.teacher.members:
        if member.entry_point.imported() is not ctc_teacher:
            continue
        settings = member.entry_point.arguments(ctc_teacher)
        hear = _at_low_rate(settings["posteriors"], torch.device(device), settings["frame_ms"])
        found, fit = estimate_map(_examples(store, run_uri, audio, hear), num_senones)
        Path(settings["senone_map"]).write_bytes(found.to_bytes())
        fits[settings["senone_map"]] = fit
    if not fits:
        need = f"{ctc_teacher.__module__}:{ctc_teacher.__name__}"
        raise ConfigurationError(f"{recipe_path}: targets.teacher: need factory = {need!r}")
    return fits


@torch.no_grad()
def _examples(
    store: ObjectStore, run_uri: str, audio: AudioSource, hear: Posteriors
) -> Iterator[Example]:
    aligned: dict[str, UInt16[np.ndarray, " _frames"]] = {}
    for output in read_manifest(store, run_uri, ALIGNMENT_STEP).outputs:
        for row in read_partition(read_output(store, run_uri, output)):
            assert isinstance(row.targets, Alignment), "labelled data have hard targets"
            aligned[row.utterance_id] = low_rate_alignment(row.targets.senones, 0).copy()
    for output in read_manifest(store, run_uri, features_step(LABELLED)).outputs:
        rows = read_features(read_output(store, run_uri, output))
        known = [row for row in rows if row.utterance_id in aligned]
        for heard, frames in zip(known, audio.frames_of(known), strict=True):
            if isinstance(frames, TeacherFailure):
                log(f"{heard.utterance_id} is left out: {frames.reason}")
                continue
            (posteriors,) = hear([torch.from_numpy(frames(0).flatten())])
            yield posteriors.cpu(), torch.from_numpy(aligned[heard.utterance_id].astype(np.int64))
