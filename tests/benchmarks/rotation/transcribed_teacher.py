"""Label as if some unlabelled speakers were transcribed: what better labels would bring a student.

`make` is a teacher of the recipe's `targets.teacher`. It labels the share `share` of the speakers
by forced alignment of their transcripts, and the others by the run's own first teacher.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from infra.store.object_store import ObjectStore
from pipeline.placement_versions import clearest_versions, distinct
from pipeline.records import source_id
from pipeline.runs.names import TEACHER, UNLABELLED, sequence_trained
from pipeline.sampling import NUM_PRIORITIES, sampling_priority
from pipeline.shards import FeatureRow
from pipeline.splicing import STACK, low_rate_alignment
from pipeline.steps.targets import spliced_frames
from tests.benchmarks.rotation.folds import Corpus
from tests.benchmarks.rotation.scores import CLEAN, RECIPE, SECOND_TEACHER, rows_of
from training.align.network_alignment import network_alignments, read_tree
from training.decode.lexicon import parse_lexicon
from training.models.store import load_model
from training.settings.recipe import read_recipe
from training.targets.teacher import Member

RUN, KALDI_DIR = "ROTATION_RUN", "ROTATION_KALDI_DIR"

ALIGNMENT_SCALE = 0.3
SURE_LOGIT = 20.0
"""Of the aligned senone, where all others have 0: of 108, its probability is 1 - 2e-7."""

_SEED = 11


def transcribed_rows(store: ObjectStore, run_uri: str, corpus: Corpus) -> list[FeatureRow]:
    """Read the clearest version of each unlabelled utterance, with its transcript."""
    rows = distinct(clearest_versions(rows_of(store, run_uri, UNLABELLED)))
    texts = {key: " ".join(words) for key, words in corpus.text_of.items()}
    # Ids of versions end with their placement.
    sources = [source_id(row.utterance_id, [row.placement or CLEAN]) for row in rows]
    return [replace(row, text=texts[name]) for name, row in zip(sources, rows, strict=True)]


def is_transcribed(speaker_id: str, share: float) -> bool:
    """Return whether a speaker is of the share whose transcripts label."""
    return sampling_priority(_SEED, speaker_id) < share * NUM_PRIORITIES


class TranscribedTeacher:
    """TranscribedTeacher answers aligned senones to the frames it knows, and a model's to others.

    `senones_of` has them by the digest of an utterance's spliced frames.
    """

    def __init__(self, senones_of: dict[str, np.ndarray], model: Member, num_senones: int) -> None:
        self._senones_of = senones_of
        self._model = model
        self._num_senones = num_senones

    def __call__(self, utterances: list[Tensor]) -> Sequence[Float32[Tensor, "_frames senones"]]:
        """Return each utterance's logits."""
        return [self._label(each) for each in utterances]

    def _label(self, frames: Tensor) -> Tensor:
        senones = self._senones_of.get(frames_digest(frames.numpy()))
        if senones is None:
            (logits,) = self._model([frames])
            return logits
        logits = torch.zeros(len(frames), self._num_senones)
        logits[torch.arange(len(frames)), torch.from_numpy(senones.astype(np.int64))] = SURE_LOGIT
        return logits


def frames_digest(frames: Float32[np.ndarray, "_frames 192"]) -> str:
    """Return the digest by which a teacher, who is given frames alone, knows an utterance."""
    return sha256(np.ascontiguousarray(frames, np.float32).tobytes()).hexdigest()


def make(device: torch.device, num_senones: int, share: float) -> TranscribedTeacher:
    """Align the transcribed speakers by the run's second teacher, and load its first one.

    The environment names the run and the corpus's folder, RUN and KALDI_DIR.
    """
    run, kaldi_dir = os.environ[RUN], os.environ[KALDI_DIR]
    store, form = ObjectStore((run,)), read_recipe(str(RECIPE)).models.of(TEACHER)
    aligner, first = (
        load_model(store, run, sequence_trained(name), form).to(device)
        for name in (SECOND_TEACHER, TEACHER)
    )
    every = transcribed_rows(store, run, Corpus(Path(kaldi_dir)))
    rows = [row for row in every if is_transcribed(row.speaker_id, share)]
    lexicon = parse_lexicon(Path(run, "corpus", "lexicon.txt").read_text())
    aligned = network_alignments(rows, aligner, lexicon, read_tree(store, run), ALIGNMENT_SCALE)
    senones_of = {
        frames_digest(spliced_frames(row, offset)): low_rate_alignment(senones, offset)
        for row in rows
        for senones in [aligned[row.utterance_id]]
        if not isinstance(senones, str)
        for offset in range(STACK)
    }
    return TranscribedTeacher(senones_of, first.model.utterance_logits, num_senones)
