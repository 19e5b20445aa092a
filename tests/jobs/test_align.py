"""The job of alignment says which bound kept the senone tree smaller than asked for."""

from typing import Any

import pytest

from jobs.align import unreached_senones
from pipeline.runs.manifest import Manifest
from pipeline.runs.names import BOOTSTRAP_STEP

CONFIG = {"senones": {"max_senones": 200, "min_count": 150}}


def said(**statistics: Any) -> str:
    return unreached_senones(Manifest(BOOTSTRAP_STEP, CONFIG, {}, (), statistics=statistics))


@pytest.mark.parametrize(
    ("bound", "reason"),
    [
        ("min_count", "a side below senones.min_count = 150 frames; lower it for more"),
        ("contexts", "the transcripts have no more triphones to tell apart"),
    ],
)
def test_the_bound_is_named_with_its_remedy(bound: str, reason: str) -> None:
    """The line has the senones, what was asked for, and the setting that stands in the way."""
    line = said(num_senones=133, senone_bound=bound)
    assert line.startswith("133 senones of max_senones = 200: ")
    assert line.endswith(reason)


def test_nothing_is_said_of_a_tree_as_large_as_asked_for() -> None:
    """Nor of a run that an earlier version began, whose manifest names no bound."""
    assert said(num_senones=200, senone_bound="max_senones") == said(num_senones=133) == ""
