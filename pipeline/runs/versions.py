"""The versions that a step's bytes depend on: of megahour, and of the engines that compute them."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata

from pipeline.runs.names import (
    ALIGNMENTS_FOLDER,
    CERTIFICATE_STEP,
    EVALUATION_STEP,
    FEATURES_FOLDER,
    GRAPHS_FOLDER,
    KBEST_COSTS_STEP,
    LATTICES_FOLDER,
    MODELS_FOLDER,
    PARTITIONS_FOLDER,
    SELECTION_FOLDER,
    TARGETS_FOLDER,
    TUNING_STEP,
    folder_of,
)

MEGAHOUR = "megahour"

ENGINES: Mapping[str, tuple[str, ...]] = {
    SELECTION_FOLDER: ("numpy",),
    FEATURES_FOLDER: (
        *("kaldi-native-fbank", "miniaudio", "numpy"),
        *("pyarrow", "scipy", "soundfile"),
    ),
    ALIGNMENTS_FOLDER: ("kaldi-decoder", "kaldifst", "numpy", "pyarrow", "scipy", "torch"),
    LATTICES_FOLDER: ("kaldi-decoder", "kaldifst", "numpy", "pyarrow", "torch"),
    MODELS_FOLDER: ("numpy", "torch"),
    TARGETS_FOLDER: ("numpy", "pyarrow", "torch"),
    PARTITIONS_FOLDER: ("numpy", "pyarrow"),
    CERTIFICATE_STEP: ("numpy",),
    KBEST_COSTS_STEP: ("numpy", "pyarrow", "scipy", "torch"),
    **dict.fromkeys(
        (TUNING_STEP, GRAPHS_FOLDER, EVALUATION_STEP),
        ("kaldi-decoder", "kaldialign", "kaldifst", "numpy", "torch"),
    ),
}
"""The distributions that compute or write the objects of each kind of step."""


@cache
def installed_version(name: str) -> str:
    """Return a distribution's version. Reading it takes 0.7 ms, and a task asks for seven.

    Raises PackageNotFoundError if it is not installed.
    """
    return metadata.version(name)


def step_versions(step: str, engines: Sequence[str] = ()) -> dict[str, str]:
    """Return the versions that the bytes of `step` depend on, by distribution; installed ones.

    Some steps have `engines` besides those of their kind.
    """
    versions = {}
    for name in (MEGAHOUR, *ENGINES.get(folder_of(step), ()), *engines):
        # A cluster may lack an engine that its recipe does not choose.
        with suppress(metadata.PackageNotFoundError):
            versions[name] = installed_version(name)
    return versions


def changed_versions(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Name what differs, as in "numpy 2.4.6, now 2.5.0"; "" if nothing does."""
    return "; ".join(
        f"{name} {before.get(name, 'unknown')}, now {now.get(name, 'unknown')}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    )
