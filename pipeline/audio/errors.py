"""Name the reasons for which audio cannot be used."""

from typing import Literal

AudioReason = Literal[
    "missing_object",
    "access_denied",
    "outside_prefixes",
    "too_large",
    "empty_object",
    "not_audio",
    "truncated",
    "joined_files",
    "newlines_converted",
    "checksum_mismatch",
    "wrong_sample_rate",
    "not_mono",
    "too_short",
    "too_long",
    "unknown_length",
    "silent",
    "non_finite",
    "clipped",
    "duration_mismatch",
    "segment_beyond_end",
    "member_beyond_end",
]


class AudioError(ValueError):
    """Audio that cannot be used; `reason` is its name in the quarantine ledger."""

    def __init__(self, reason: AudioReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
