"""Compare the manifests of a whole run, by step, with one another."""

from collections.abc import Sequence

from infra.store.object_store import ObjectStore
from pipeline.records import Tally
from pipeline.runs.manifest import Manifest, read_output
from pipeline.runs.names import DEV, SUBSETS, model_step, teachers

STEPS = {
    "ingest",
    *(f"{step}/{subset}" for step in ("selection", "features") for subset in SUBSETS),
    *("alignments/bootstrap", "alignments/round_1", "alignments/labelled"),
    "graphs/decoding",
    *(f"models/{name}" for name in ("aligner_1", "aligner", "baseline", "teacher", "student")),
    *("targets/unlabelled", "partitions/unlabelled", "evaluation", "certificate", "report"),
    "kbest_costs",
}
DEV_STEPS = {"selection/dev", "features/dev", "alignments/dev", "tuning"}


def manifest_bytes(store: ObjectStore, run_uri: str) -> dict[str, bytes]:
    """Return every manifest below a run, as stored, by its step."""
    suffix = "/manifest.json"
    return {
        found.uri.removeprefix(f"{run_uri}/").removesuffix(suffix): store.get(found.uri)
        for found in store.list(run_uri)
        if found.uri.endswith(suffix)
    }


def require_balance(
    store: ObjectStore, run_uri: str, subsets: Sequence[str], ensemble: int = 1
) -> dict[str, Manifest]:
    """Require all steps, and in = out + quarantined in each and from each to the next."""
    stored = manifest_bytes(store, run_uri)
    expected = STEPS | {*map(model_step, teachers(ensemble))}
    assert stored.keys() == expected | (DEV_STEPS if DEV in subsets else set())
    manifests = {step: Manifest.from_bytes(data) for step, data in stored.items()}
    for step, manifest in manifests.items():
        assert manifest.tally_in == manifest.tally_out + manifest.quarantined, step
        held = sum((output.tally for output in manifest.outputs), Tally())
        assert not manifest.outputs or held == manifest.tally_out, step
        lost = sum((ledger.tally for ledger in manifest.ledgers), Tally())
        assert lost == manifest.quarantined, step
        if step != "ingest":  # its outputs are the corpus's, not the run's
            for output in (*manifest.outputs, *manifest.ledgers):
                assert len(read_output(store, run_uri, output)) == output.num_bytes
    _require_chain(manifests, subsets)
    aligned = manifests["alignments/labelled"].tally_out
    assert all(manifests[model_step(name)].tally_in == aligned for name in teachers(ensemble))
    return manifests


def _require_chain(manifests: dict[str, Manifest], subsets: Sequence[str]) -> None:
    selected = [manifests[f"selection/{subset}"] for subset in subsets]
    assert sum((each.tally_in for each in selected), Tally()) == manifests["ingest"].tally_out
    of_dev = (("features/dev", "alignments/dev"), ("features/dev", "tuning"))
    for earlier, later in (
        *((f"selection/{subset}", f"features/{subset}") for subset in subsets),
        *(of_dev if DEV in subsets else ()),
        ("features/unlabelled", "targets/unlabelled"),
        ("targets/unlabelled", "partitions/unlabelled"),
        ("features/labelled", "alignments/bootstrap"),
        ("features/labelled", "alignments/round_1"),
        ("features/labelled", "alignments/labelled"),
        ("alignments/bootstrap", "models/aligner_1"),
        ("alignments/round_1", "models/aligner"),
        ("alignments/labelled", "models/baseline"),
        ("alignments/labelled", "models/teacher"),
        ("features/heldout", "evaluation"),
    ):
        assert manifests[later].tally_in == manifests[earlier].tally_out, later
    both = manifests["alignments/labelled"].tally_out + manifests["partitions/unlabelled"].tally_out
    assert manifests["models/student"].tally_in == both
