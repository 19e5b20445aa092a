"""Look an utterance up in the id indexes of a run's selections."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from infra.store.object_store import ObjectStore, normalize_uri
from pipeline.audit.tracing.metadata_record import metadata_of_day
from pipeline.audit.tracing.search import Hit, in_lines
from pipeline.runs.manifest import Manifest, Output, Outputs, is_finished, read_manifest
from pipeline.runs.names import ALL_SUBSETS, LEDGER_SUFFIX, selection_step
from pipeline.runs.outputs import find_outputs
from pipeline.steps.selection.id_index import find_named
from pipeline.steps.selection.select import metadata_uri


def run_that_selected(store: ObjectStore, run_uri: str, corpus_uri: str, utterance_id: str) -> str:
    """Return which run of a chain selected an utterance; the last one if none has."""
    lookup = IdLookup(store, run_uri, corpus_uri, utterance_id)
    for step in map(selection_step, ALL_SUBSETS):
        if not is_finished(store, run_uri, step):
            continue
        manifest = read_manifest(store, run_uri, step)
        hit = lookup.in_files(manifest) if manifest.extends else None
        if hit is not None:
            return (
                next(each.run for _, each in find_outputs(manifest.outputs, [hit.key])) or run_uri
            )
    return run_uri


@dataclass(frozen=True, slots=True)
class IdLookup:
    """IdLookup narrows what a search reads to the objects that name the utterance.

    Steps other than selections, and those of an older version, have no id index: all of their
    objects may name it.
    """

    store: ObjectStore
    run_uri: str
    corpus_uri: str
    utterance_id: str
    named: dict[str, frozenset[str]] = field(default_factory=dict)

    def in_files(self, manifest: Manifest) -> Hit | None:
        """Look in those of a manifest's selection files that may hold the utterance."""
        return self._in_lines(manifest, manifest.outputs, is_ledger=False)

    def in_ledgers(self, manifest: Manifest) -> Hit | None:
        """Look in those of a manifest's ledgers that may hold the utterance."""
        return self._in_lines(manifest, manifest.ledgers, is_ledger=True)

    def _in_lines(self, manifest: Manifest, listed: Outputs, is_ledger: bool) -> Hit | None:
        outputs: Sequence[Output] = listed
        if manifest.id_index or manifest.extends:
            # Stored objects alone: metadata, which are in no list, would have all parts read.
            stored = (key for key in self._named_in(manifest) if not key.startswith("/"))
            keys = [key for key in stored if key.endswith(LEDGER_SUFFIX) == is_ledger]
            outputs = [output for _, output in sorted(find_outputs(listed, keys), key=_place)]
        return in_lines(self.store, self.run_uri, outputs, self.utterance_id)

    def metadata_uris(
        self, subset: str, manifest: Manifest | None, created_at: str | None
    ) -> Sequence[str]:
        """Return the metadata objects of a subset that may hold the record, the likeliest first."""
        base = normalize_uri(metadata_uri(self.corpus_uri, subset))
        if manifest is None or not (manifest.id_index or manifest.extends):
            return metadata_of_day(self.store, base, created_at)
        named = self._named_in(manifest)
        # Those of earlier runs are no inputs of an increment; stored objects have keys.
        return [f"{base}{name}" for name in sorted(named) if name.startswith("/")]

    def _named_in(self, manifest: Manifest) -> frozenset[str]:
        if manifest.step not in self.named:
            found = find_named(self.store, self.run_uri, manifest, self.utterance_id)
            self.named[manifest.step] = found
        return self.named[manifest.step]


def _place(found: tuple[int, Output]) -> int:
    return found[0]
