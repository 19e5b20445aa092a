"""State to bytes without pickle, and checkpoints of several ranks."""

from pathlib import Path

import pytest
import torch

from infra.object_store import ObjectStore
from training.checkpoint import Checkpoints
from training.state import decode_state, encode_state


def test_an_optimizers_state_survives_the_round_trip() -> None:
    """Integer keys, tuples, tensors of several types, None and nesting come back as they were."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.8, 0.9))
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    state = {"optimizer": optimizer.state_dict(), "random": torch.get_rng_state(), "none": None}
    decoded = decode_state(encode_state(state))
    assert decoded["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    for key, moments in state["optimizer"]["state"].items():
        for name, value in moments.items():
            assert torch.equal(decoded["optimizer"]["state"][key][name], value)
    assert torch.equal(decoded["random"], state["random"])
    assert decoded["none"] is None


def test_the_same_state_gives_the_same_bytes() -> None:
    """No time and no address is in them."""
    state = {"a": torch.arange(5), "b": [1, 2.5, "x", True]}
    assert encode_state(state) == encode_state(state)


def test_foreign_bytes_and_values_are_refused() -> None:
    """Bytes that are no state, and objects that only pickle could store."""
    with pytest.raises(ValueError, match="no state of megahour"):
        decode_state(b"PK\x03\x04 whatever")
    with pytest.raises(TypeError, match="cannot be stored"):
        encode_state({"object": object()})


def checkpoints(folder: Path, world_size: int = 1, identity: str = "a") -> Checkpoints:
    store = ObjectStore((str(folder),))
    return Checkpoints(store, str(folder / "checkpoints"), identity, 0, world_size, lambda: None)


def test_the_newest_checkpoint_is_restored_with_the_random_state(tmp_path: Path) -> None:
    """The next visit, the state, and the next random number are those after the save."""
    assert checkpoints(tmp_path).restore() == (0, None)
    for index in range(3):
        checkpoints(tmp_path).save(index, {"weights": torch.full((2,), float(index))})
    expected = torch.rand(1)
    torch.rand(9)
    index, state = checkpoints(tmp_path).restore()
    assert index == 3
    assert state is not None
    assert state["weights"].tolist() == [2.0, 2.0]
    assert torch.equal(torch.rand(1), expected)


def test_checkpoints_of_another_world_or_recipe_are_refused(tmp_path: Path) -> None:
    """The messages name both sizes, or the remedy."""
    checkpoints(tmp_path, world_size=4).save(0, {})
    with pytest.raises(ValueError, match=r"written by 4 ranks, now there are 2"):
        checkpoints(tmp_path, world_size=2).restore()
    with pytest.raises(ValueError, match="another recipe"):
        checkpoints(tmp_path, world_size=4, identity="b").restore()
