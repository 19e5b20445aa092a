"""Open and close the process group of all ranks."""

import pytest

from training.distributed import process_group


def test_the_world_must_be_opened() -> None:
    """The world exists only within open_world(), and has one rank without torchrun."""
    with pytest.raises(RuntimeError, match=r"no process group yet: call within"):
        process_group.default_world()
    with process_group.open_world(time_limit_s=5.0) as group:
        assert process_group.default_world() is group
        assert group.size() == 1
    with pytest.raises(RuntimeError, match=r"no process group yet"):
        process_group.default_world()
