"""Small shuffle buffers, and the reads of partitions, which tests of the reader count."""

from collections.abc import Iterator

import pytest

from infra.store.object_store import ObjectStore
from training.data import row_order


@pytest.fixture(scope="module")
def small_buffers() -> Iterator[None]:
    """Give each rank several shuffle buffers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_order, "BUFFER_FRAMES", 150)
        yield


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """URIs of the partitions that have been read whole, in order."""
    uris: list[str] = []
    plainly = ObjectStore.get

    def counting(store: ObjectStore, uri: str) -> bytes:
        uris.append(uri)
        return plainly(store, uri)

    monkeypatch.setattr(ObjectStore, "get", counting)
    return uris
