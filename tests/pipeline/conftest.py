"""Give tests of steps and their commits the context of a step."""

from pathlib import Path

import pytest

from infra.store.object_store import ObjectStore
from pipeline.runs.commit import StepContext, step_context
from tests.pipeline.runs.small_commits import CONFIG, INPUTS


@pytest.fixture
def context(tmp_path: Path) -> StepContext:
    """Return the context of a step in a folder of its own."""
    return step_context(ObjectStore((str(tmp_path),)), str(tmp_path), "features/x", CONFIG, INPUTS)
