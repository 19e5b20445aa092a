"""How this process was launched: the one place that reads what torchrun tells its processes."""

import os


def is_launched() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launched_rank() -> int:
    """The rank that torchrun gave this process; 0 if it was started otherwise."""
    return int(os.environ["RANK"]) if is_launched() else 0
