"""Check that a store behaves as commits and listings need it, before a run writes to it.

Some stores that speak S3's protocol pass If-None-Match over, so that two attempts both commit, or
list as directories are walked, so that pages by key lose objects. Neither shows in an answer.
"""

from infra.store.object_store import ObjectStore, RequestRefused, StoreError, join_uri
from infra.store.s3.errors import endpoint
from infra.store.uris import is_s3, normalize_uri

NAMES = ("B", "a-b", "a/b")
"""In the order of bytes. Where directories are walked, a/b comes first, and B last without case."""

_TEXT = b"megahour writes this object to find out whether the store refuses a second write of it.\n"
_SUITABLE = "such as AWS S3 or Ceph"


def check_store(store: ObjectStore, folder: str) -> None:
    """Write a few objects below `folder` in S3; StoreError names what the store does not do.

    It must refuse the second of two conditional writes, and list what was written in the order of
    keys. The objects stay, so that a later check writes nothing, and no right to delete is needed.
    Local paths need no check: an exclusive link and a walk of folders are the system's own.
    """
    if not is_s3(normalize_uri(folder)):
        return
    uris = [join_uri(folder, name) for name in NAMES]
    _require_conditional_writes(store, uris[0])
    if absent := _not_listed(store, folder, uris):
        for uri in absent:
            store.put_if_absent(uri, _TEXT)
        if absent := _not_listed(store, folder, uris):
            raise StoreError(
                f"{folder}: the listing by {endpoint()} lacks {absent[0]}, which was written "
                f"before: what a listing lacks is lost: use a store that lists all, {_SUITABLE}"
            )


def _require_conditional_writes(store: ObjectStore, uri: str) -> None:
    """Write twice unless the object is there; concurrent checks may share it."""
    try:
        # A first write whose answer was lost is refused as a second one is.
        is_second_taken = store.put_if_absent(uri, _TEXT) and store.put_if_absent(uri, _TEXT)
    except RequestRefused as error:
        store.put(uri, _TEXT)  # raises where it is not the condition that is refused
        raise _unsuitable(uri, f"refuses conditional writes ({error.answer})") from error
    if is_second_taken:
        raise _unsuitable(uri, "passes the condition of conditional writes over")


def _unsuitable(uri: str, what: str) -> StoreError:
    return StoreError(
        f"{uri}: the store at {endpoint()} {what}, PUT with If-None-Match: two attempts at a task "
        f"could both commit: use a store that has them, {_SUITABLE}, or a version of it that does"
    )


def _not_listed(store: ObjectStore, folder: str, uris: list[str]) -> list[str]:
    listed = {found.uri for found in store.list(folder)}
    return [uri for uri in uris if uri not in listed]
