"""Find metadata in a corpus that a step did not write; of what it did, the driver has hashes."""

from collections.abc import Iterable
from functools import partial
from itertools import islice

import numpy as np
from jaxtyping import UInt64

from infra.store.object_store import ObjectStore, join_uri
from pipeline.runs.names import METADATA_FOLDER
from pipeline.runs.outputs import Output, Outputs, OutputsInParts
from pipeline.runs.step import Distribute
from pipeline.sampling import hash_name
from pipeline.steps.selection.buckets import is_mark
from pipeline.steps.selection.hash_ranges import is_among

OBJECTS_AT_A_TIME = 10_000
"""So many listed objects are compared at a time, 5 MB."""

Hashes = UInt64[np.ndarray, " objects"]


def require_only(
    store: ObjectStore, corpus_uri: str, outputs: Outputs, distribute: Distribute
) -> None:
    """Raise ValueError for metadata in the corpus that is not among a step's outputs.

    They are compared by 64 bits: beside a hundred million outputs, another object is overlooked
    once in 10^11 cases.
    """
    ours = _hashes_of(corpus_uri, outputs, distribute)
    listed = store.list_each(join_uri(corpus_uri, METADATA_FOLDER))
    uris = (found.uri for found in listed if not is_mark(found))
    while some := list(islice(uris, OBJECTS_AT_A_TIME)):
        is_ours = is_among(_hashed(some), ours)
        if not is_ours.all():
            uri = some[int(np.argmin(is_ours))]
            remedy = "use another corpus.uri, or remove the corpus there"
            raise ValueError(f"{uri} is from another corpus than these manifests: {remedy}")


def _hashes_of(corpus_uri: str, outputs: Outputs, distribute: Distribute) -> Hashes:
    """Hash the URIs of outputs, of each part by a task; return the hashes by rising value."""
    hash_uris = partial(hash_uris_of, corpus_uri)
    if isinstance(outputs, OutputsInParts):
        hashes = distribute(outputs.by_part(), hash_uris, "hash the names of objects")
    else:
        hashes = [hash_uris(outputs)]
    return np.sort(np.concatenate(hashes))


def hash_uris_of(corpus_uri: str, outputs: Iterable[Output]) -> Hashes:
    """Hash the URIs of some outputs to 64 bits each."""
    return _hashed(join_uri(corpus_uri, output.key) for output in outputs)


def _hashed(uris: Iterable[str]) -> Hashes:
    return np.fromiter(map(hash_name, uris), np.uint64)
