"""The reference: log-mel energies by kaldi-native-fbank, the code of the Kaldi family."""

from functools import cache
from typing import Any

import numpy as np
from jaxtyping import Float32

from pipeline.filterbank import FRAME_SHIFT_MS, NUM_BINS, SAMPLE_RATE_HZ, WINDOW_MS
from pipeline.filterbank.fast import HIGH_HZ, LOW_HZ, PRE_EMPHASIS


def kaldi_log_mel_energies(
    samples: Float32[np.ndarray, " samples"],
) -> Float32[np.ndarray, "frames 64"]:
    """Compute the energies of at least one window of 16 kHz samples in [-1, 1]."""
    # Here, as a recipe that names the fast engine needs no Kaldi.
    from kaldi_native_fbank import OnlineFbank  # noqa: PLC0415

    filter_bank = OnlineFbank(_options())
    # A memoryview crosses into C++ 1.4 times as fast as the array itself, 1.15 as a list.
    filter_bank.accept_waveform(SAMPLE_RATE_HZ, (samples * np.float32(32768)).data)
    filter_bank.input_finished()
    frames = [filter_bank.get_frame(frame) for frame in range(filter_bank.num_frames_ready)]
    return np.concatenate(frames).reshape(-1, NUM_BINS)


@cache
def _options() -> Any:  # noqa: ANN401
    from kaldi_native_fbank import FbankOptions  # noqa: PLC0415

    options = FbankOptions()
    options.frame_opts.samp_freq = SAMPLE_RATE_HZ
    options.frame_opts.frame_length_ms = WINDOW_MS
    options.frame_opts.frame_shift_ms = FRAME_SHIFT_MS
    options.frame_opts.dither = 0.0
    options.frame_opts.preemph_coeff = PRE_EMPHASIS
    options.frame_opts.remove_dc_offset = True
    options.frame_opts.window_type = "povey"
    options.frame_opts.snip_edges = True
    options.mel_opts.num_bins = NUM_BINS
    options.mel_opts.low_freq = LOW_HZ
    options.mel_opts.high_freq = HIGH_HZ
    return options
