"""Train monophones on utterances, and align these by them."""

from collections.abc import Sequence

import numpy as np

from pipeline.shards import FeatureRow
from training.align.monophone_hmm import speaker_cepstra, train_monophones
from training.decode.lexicon import Lexicon
from training.decode.senones import PhoneAlignment, Unaligned
from training.settings.decoding import BootstrapConfig


def row_of(utterance_id: str, speaker_id: str, text: str, features: np.ndarray) -> FeatureRow:
    """Return an utterance as a feature shard has it."""
    return FeatureRow(
        utterance_id=utterance_id,
        speaker_id=speaker_id,
        duration_ms=10 * len(features),
        created_at="",
        audio_uri="",
        audio_etag="",
        text=text,
        placement=None,
        features=features.astype(np.float16),
    )


def align_by_monophones(
    utterances: Sequence[FeatureRow], lexicon: Lexicon, config: BootstrapConfig
) -> dict[str, PhoneAlignment | Unaligned]:
    """Return the phones by utterance id, or why there are none."""
    cepstra = speaker_cepstra(utterances)
    monophones = train_monophones(utterances, cepstra, lexicon, config).monophones
    return {
        each.utterance_id: monophones.align(each, cepstra[each.utterance_id], lexicon)
        for each in utterances
    }
