"""Check that a store behaves as commits and listings need it, before a run writes to it.

Some stores that speak S3's protocol ignore If-None-Match, so that two attempts both commit, or list
as directories are walked, so that pages by key lose objects. Neither shows in an answer.
"""

from typing import TYPE_CHECKING

from infra.store.objects import RequestRefused, StoreError
from infra.store.s3.errors import endpoint
from infra.store.uris import join_uri

if TYPE_CHECKING:
    from infra.store.s3.s3_store import S3Store

NAMES = ("B", "a-b", "a/b")
"""In the order of bytes. Where directories are walked, a/b comes first, and B last without case."""

_TEXT = b"megahour writes this object to find out whether the store refuses a second write of it.\n"
_SUITABLE = "such as AWS S3 or Ceph"


def check_behaviour(store: "S3Store", folder: str) -> None:
    """Write a few objects below `folder`; StoreError names what the store does not do.

    It must refuse the second of two conditional writes, and list what was written in the order of
    keys. The objects stay, so that a later check changes nothing, and no right to delete is needed.
    """
    uris = [join_uri(folder, name) for name in NAMES]
    _require_conditional_writes(store, uris[0])
    if absent := _not_listed(store, folder, uris):
        for uri in absent:
            store.put_if_absent(uri, _TEXT)
        if absent := _not_listed(store, folder, uris):
            raise StoreError(
                f"{folder}: a listing by the store at {endpoint()} lacks {absent[0]}, which was "
                "written before, and so would lose speech: use a store whose listings hold all "
                f"that was written, {_SUITABLE}"
            )


def _require_conditional_writes(store: "S3Store", uri: str) -> None:
    """Write twice unless the object is there; concurrent checks may share it."""
    try:
        # A first write whose answer was lost is refused as a second one is.
        is_second_taken = store.put_if_absent(uri, _TEXT) and store.put_if_absent(uri, _TEXT)
    except RequestRefused as error:
        store.put(uri, _TEXT)  # raises where it is not the condition that is refused
        raise _unsuitable(uri, f"refuses them: {error.answer}") from error
    if is_second_taken:
        raise _unsuitable(uri, f"at {endpoint()} ignores them: it took a second write")


def _unsuitable(uri: str, what: str) -> StoreError:
    return StoreError(
        f"{uri}: need conditional writes (PUT with If-None-Match), without which two attempts at a "
        f"task could both commit; the store {what}: use a store, or a version of it, that answers "
        f"412 to the second, {_SUITABLE}"
    )


def _not_listed(store: "S3Store", folder: str, uris: list[str]) -> list[str]:
    listed = {found.uri for found in store.list(folder)}
    return [uri for uri in uris if uri not in listed]
