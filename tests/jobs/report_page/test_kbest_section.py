"""The report's section on what k costs, from stored statistics."""

from typing import Any

import pytest

from jobs.report_page.page import render_report
from jobs.report_page.targets_and_shuffle import costs_warning

pytestmark = pytest.mark.usefixtures("plain_drawings")


def means(mass: float) -> dict[str, Any]:
    by_form = {
        f"{what}_{form}": value
        for what, value in (("calibration_error", 0.0123), ("angle", 17.5))
        for form in ("renormalized", "ghost", "sampled")
    }
    alone = {key: value for key, value in by_form.items() if "sampled" not in key}
    return {
        "num_frames": 5000,
        "k": {
            "1": {"mass": mass / 2, "agreement": 0.5, **alone},
            "20": {"mass": mass, "agreement": 0.875, **by_form},
        },
    }


def report(*masses: float) -> dict[str, Any]:
    by_placement = {f"DP{number}": means(mass) for number, mass in enumerate(masses, 1)}
    return {
        "run": "runs/demo",
        "code_version": "1",
        "targets": {"k": 20, "mean_retained_mass": 0.9, "num_frames": 1},
        "kbest_costs": {"all": means(0.99), "by_placement": by_placement},
    }


def test_the_section_has_the_stored_numbers_and_a_plot() -> None:
    """Each placement's mass, agreement, error and angle; without statistics there is none."""
    page = render_report(report(0.97, 0.96))
    section = page[page.rindex("Retained mass by k") :]
    for shown in ("DP1, 5,000 frames", "97.00", "87.50", "0.0123", "17.5", "<svg", "kbest"):
        assert shown in section
    assert "Warning" not in page
    for empty in ({}, None):
        assert "Retained mass by k" not in render_report({**report(0.97), "kbest_costs": empty})


@pytest.mark.parametrize(("mass", "is_low"), [(0.9499, True), (0.95, False), (0.99, False)])
def test_a_placement_that_keeps_too_little_is_named(mass: float, is_low: bool) -> None:
    """On both sides of 0.95, at the recipe's k alone: at k = 1 half of it is kept."""
    warned = costs_warning(report(0.99, mass))
    assert ("at DP2 (95.0 %)" in warned) == is_low
    assert "DP1" not in warned
    assert (warned in render_report(report(0.99, mass)).replace("&#39;", "'")) or not is_low
    assert bool(warned) == is_low
