"""The certificate of a torch dataset's order, with a verdict (003 IV-A2)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from training.certificate import FORMS, CertificateConfig, certificate
from training.data.partition_dataset import PartitionDataset

BETTER_HIGH = (
    "effective_files",
    "effective_speakers",
    "mean_displacement",
    "median_displacement",
)
"""Figures that fall where an order is less mixed; the others rise."""


@dataclass(frozen=True, slots=True)
class DatasetCertificate:
    """DatasetCertificate: the figures as `certify` has them, and those that are too little mixed.

    A figure is, if it lies beyond the range of ten uniform orders by more than the range's width:
    some five standard deviations, which chance makes once in a million figures.
    """

    figures: Mapping[str, Any]
    less_mixed: tuple[str, ...]

    @property
    def is_uniform(self) -> bool:
        """Return whether the order passes for a uniform one."""
        return not self.less_mixed

    @property
    def verdict(self) -> str:
        """Return the verdict as a sentence."""
        if self.is_uniform:
            return "The order is as mixed as uniform orders of the same rows."
        return f"The order is less mixed than uniform orders: {', '.join(self.less_mixed)}."


def certify_dataset(dataset: PartitionDataset, num_steps: int = 64) -> DatasetCertificate:
    """Certify the first `num_steps` steps of the first six sub-epochs; reads ids, not features.

    ValueError if no sub-epoch has two steps, or `num_steps` is below 2.
    """
    config = CertificateConfig(dataset.dataset.world_size, num_steps, 6)
    figures = certificate(dataset.dataset, dataset.sub_epochs, config)
    found = tuple(
        f"{where} {name}" for where, name, each in _figures(figures) if _is_low(name, each)
    )
    return DatasetCertificate(figures, found)


def _figures(figures: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, float | None]]]:
    for form in FORMS:
        for minibatch in ("step", "rank"):
            for name, figure in figures.get(form, {}).get(minibatch, {}).items():
                yield f"{form} {minibatch}", name, figure


def _is_low(name: str, figure: Mapping[str, float | None]) -> bool:
    measured, low, high = (figure[each] for each in ("measured", "uniform_low", "uniform_high"))
    if measured is None or low is None or high is None:
        return False
    width = high - low
    return measured < low - width if name in BETTER_HIGH else measured > high + width
