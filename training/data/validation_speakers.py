"""Leave labelled speakers out of training, on whom newbob measures its loss (000 3.2)."""

from collections.abc import Iterable, Mapping
from functools import cache, partial
from itertools import chain

import numpy as np
from jaxtyping import Bool

from infra.prefetch import prefetch
from infra.store.object_store import ObjectStore, scan_checked
from pipeline.runs.manifest import Output
from pipeline.sampling import sampling_priority
from pipeline.shards import read_partition_speakers

LeftOut = Mapping[str, Bool[np.ndarray, " rows"]]
"""By a partition's key, which of its rows training leaves out."""


def validation_speakers(speakers: Iterable[str], one_in: int) -> list[str]:
    """Return one speaker in `one_in`, at least one: those of the lowest hashes; not the only one.

    A hash depends on no other speaker, so that more data leave mostly the same speakers out.
    """
    found = sorted(set(speakers), key=lambda speaker: (sampling_priority(0, speaker), speaker))
    return found[: max(1, len(found) // one_in)] if len(found) > 1 else []


@cache  # the same for all sub-epochs of a training, whose partitions do not change
def left_out_rows(
    store: ObjectStore, run_uri: str, labelled: tuple[Output, ...], one_in: int
) -> LeftOut:
    """Find the rows of the validation speakers; read one column of each labelled partition.

    Of a single speaker, rows 0, n, 2n, ... of each partition are left out, n = `one_in`.
    """
    uris = [output.uri(run_uri) for output in labelled]
    read = partial(scan_checked, store, scan=read_partition_speakers)
    speakers_of = {
        output.key: speakers
        for output, (_, speakers) in zip(labelled, prefetch(read, uris, 16), strict=True)
    }
    chosen = set(validation_speakers(chain.from_iterable(speakers_of.values()), one_in))
    return {
        key: np.array(
            [each in chosen if chosen else row % one_in == 0 for row, each in enumerate(speakers)],
            dtype=np.bool_,
        )
        for key, speakers in speakers_of.items()
    }
