"""State to bytes and back, without pickle."""

import numpy as np
import pytest
import torch

from training.array_encoding import decode_arrays, encode_arrays
from training.tensor_encoding import decode_state, encode_state


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


def test_bfloat16_keeps_its_bits() -> None:
    """NumPy has no such type: vectors and scalars, a NaN and an infinity come back."""
    values = torch.tensor([1.5, float("nan"), -float("inf"), 3e-39]).bfloat16()
    for value in (values, values[0]):
        decoded = decode_state(encode_state(value))
        assert decoded.dtype == torch.bfloat16
        assert torch.equal(decoded.view(torch.int16), value.view(torch.int16))


def test_arrays_need_no_torch() -> None:
    """Arrays come back as arrays, writable; neither codec reads the other's."""
    decoded = decode_arrays(encode_arrays({"a": (np.arange(3, dtype=np.int16), None)}))
    decoded["a"][0][0] = 7
    assert decoded["a"][0].dtype == np.int16
    np.testing.assert_array_equal(decoded["a"][0], [7, 1, 2])
    with pytest.raises(ValueError, match="'tensor': need array"):
        decode_arrays(encode_state(torch.zeros(2)))
    with pytest.raises(ValueError, match="'array': need tensor"):
        decode_state(encode_arrays(np.zeros(2)))


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
    with pytest.raises(TypeError, match="an array of <U1 cannot be stored: need numbers"):
        encode_arrays({"text": np.array(["a"])})
