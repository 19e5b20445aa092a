"""Train monophones on utterances, and align these by them."""

from collections.abc import Sequence

from training.align.monophone_hmm import speaker_cepstra, train_monophones
from training.decode.lexicon import Lexicon
from training.decode.senones import PhoneAlignment, TranscribedUtterance, Unaligned
from training.settings.decoding import BootstrapConfig


def align_by_monophones(
    utterances: Sequence[TranscribedUtterance], lexicon: Lexicon, config: BootstrapConfig
) -> dict[str, PhoneAlignment | Unaligned]:
    """Return the phones by utterance id, or why there are none."""
    cepstra = speaker_cepstra(utterances)
    monophones = train_monophones(utterances, cepstra, lexicon, config).monophones
    return {
        each.utterance_id: monophones.align(each, cepstra[each.utterance_id], lexicon)
        for each in utterances
    }
