"""Compare audio's length with the declared one, as exactly as that is stated."""

from decimal import Decimal

import numpy as np
from jaxtyping import Float32

from pipeline.audio.errors import AudioError
from pipeline.filterbank import SAMPLE_RATE_HZ

MAX_DURATION_ERROR_S = 1.0  # of other tools' lengths, and of recorders' rough figures
MAX_DURATION_ERROR_SHARE = 0.1
MAX_MISSING_SHARE = 0.25  # half an utterance never passes, however roughly its length is stated
MAX_SURPLUS_SHARE = 0.95  # nor do two of equal length for one, but 1.9 s cut to 1


def require_duration(
    samples: Float32[np.ndarray, " samples"], declared_s: float, padding_samples: int = 0
) -> None:
    """Raise AudioError unless the samples last about as long as the metadata declares.

    Hours are budgeted, balanced and accounted as declared; a grossly wrong one falsifies all
    three, and is often another recording, or a part of the declared one.
    """
    decoded_s = len(samples) / SAMPLE_RATE_HZ
    missing_s, surplus_s = duration_tolerance(declared_s, padding_samples)
    if not -missing_s <= decoded_s - declared_s <= surplus_s:
        bounds = f"{declared_s - missing_s:.3f} to {declared_s + surplus_s:.3f} s"
        detail = f"{decoded_s:.3f} s of audio, declared {declared_s:.3f} s: need {bounds}"
        raise AudioError("duration_mismatch", detail)


def duration_tolerance(declared_s: float, padding_samples: int) -> tuple[float, float]:
    """Return the seconds that may be missing from `declared_s` and those that may be too many.

    Either is the larger of the metadata's precision and min(1 s, 10 %), plus the codec's padding.
    A rounded number is off by at most half the unit of its last digit; one whose digits were cut
    is too small, by less than the unit. At most a quarter may be missing, and 95 % surplus.
    """
    unit_s = _last_digit_s(declared_s)
    error_s = min(MAX_DURATION_ERROR_S, MAX_DURATION_ERROR_SHARE * declared_s)
    padding_s = padding_samples / SAMPLE_RATE_HZ
    missing_s = min(max(unit_s / 2, error_s) + padding_s, MAX_MISSING_SHARE * declared_s)
    surplus_s = min(max(unit_s, error_s) + padding_s, MAX_SURPLUS_SHARE * declared_s)
    return missing_s, surplus_s


def _last_digit_s(declared_s: float) -> float:
    # A float has lost its trailing zeros: 3.0 may be whole seconds, and is taken for them.
    exponent = Decimal(repr(declared_s)).normalize().as_tuple().exponent
    return 10.0 ** min(int(exponent), 0)


def is_rounded_from(declared_s: float, num_samples: int) -> bool:
    """Return whether `declared_s` is the length of `num_samples`, exact, rounded or cut."""
    unit_s, rounding_s = _last_digit_s(declared_s), 1 / SAMPLE_RATE_HZ
    surplus_s = num_samples / SAMPLE_RATE_HZ - declared_s
    return -unit_s / 2 - rounding_s <= surplus_s <= unit_s + rounding_s
