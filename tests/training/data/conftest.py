"""The reads of partitions, which tests of the reader count."""

import pytest

from infra.store.object_store import ObjectStore


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
