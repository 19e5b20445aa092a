"""Every kind of damage to a run is found and named; an undamaged run passes; sweeping is safe."""

import json
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra.store.object_store import ObjectStore, join_uri
from pipeline.audit import corpus_objects, stored_objects
from pipeline.audit.verify import Verification, sweep, verify_run
from pipeline.records import Tally
from pipeline.runs.commit import Commit
from pipeline.runs.engine import StepRun, StepSpec, run_step
from pipeline.runs.manifest import Manifest, Output, manifest_uri, read_manifest, sha256
from pipeline.runs.names import EVALUATION_STEP
from pipeline.runs.sealed_json import seal
from pipeline.shards import read_features, write_features
from pipeline.steps.selection.id_index import IdRange
from pipeline.steps.selection.select import metadata_uri
from tests.small_run import SUBSET, copy_run, make_run, outputs, selected_ids

Run = tuple[ObjectStore, str]
STEPS = ("selection", "features", "targets", "partitions")


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A whole run."""
    return make_run(tmp_path_factory.mktemp("undamaged"))


@pytest.fixture
def run(undamaged: Run, tmp_path: Path) -> Run:
    """A copy to damage."""
    return copy_run(undamaged[1], tmp_path)


def verify(store: ObjectStore, run_uri: str) -> Verification:
    return verify_run(store, run_uri, join_uri(run_uri, "corpus"), lambda *_: None)


def findings(run: Run) -> dict[str, tuple[str, str]]:
    """Return what was expected and found, by object."""
    return {each.object: (each.expected, each.found) for each in verify(*run).findings}


def rewrite(run: Run, key: str, change: Callable[[bytes], bytes]) -> None:
    store, run_uri = run
    uri = join_uri(run_uri, key)
    store.put(uri, change(store.get(uri)))


def rewrite_manifest(run: Run, of: str, **changes: object) -> None:
    """A manifest that says something else, and is sealed."""
    rewrite(
        run,
        f"{of}/{SUBSET}/manifest.json",
        lambda data: replace(Manifest.from_bytes(data), **changes).to_bytes(),  # type: ignore[arg-type]
    )


def first_commit(run: Run, step: str) -> str:
    """The key of a commit."""
    store, run_uri = run
    return store.list(join_uri(run_uri, step, SUBSET, "commits"))[0].uri[len(run_uri) + 1 :]


def rewrite_commit(run: Run, key: str, change: Callable[[Commit], Commit]) -> None:
    """A commit that says something else, and is sealed."""
    rewrite(run, key, lambda data: change(Commit.from_bytes(data)).to_bytes())


def test_an_undamaged_run_passes(undamaged: Run) -> None:
    """There is no finding; every object of the four steps was read, and progress saw all bytes.

    It has selected, unselected and quarantined utterances, and several shards a step.
    """
    store, run_uri = undamaged
    assert 10 < len(selected_ids(store, run_uri)) < 30
    for step in ("selection", "features"):
        assert read_manifest(store, run_uri, f"{step}/{SUBSET}").quarantined.utterances == 1
    assert all(len(outputs(store, run_uri, step)) > 1 for step in STEPS)
    reported: list[tuple[int, int]] = []
    corpus_uri = join_uri(run_uri, "corpus")
    found = verify_run(store, run_uri, corpus_uri, lambda *seen: reported.append(seen))
    named = [
        output
        for step in STEPS
        for manifest in [read_manifest(store, run_uri, f"{step}/{SUBSET}")]
        for output in (
            *(*manifest.outputs, *manifest.ledgers),
            *(*manifest.id_index, *manifest.stream_means),
        )
    ]
    # What tasks of extraction left of their streams' means is named by their commits alone.
    stored = store.list(join_uri(run_uri, f"features/{SUBSET}"))
    means = [each for each in stored if re.search(r"(?<!/scratch)/../\d+-means-", each.uri)]
    assert means
    assert found.findings == ()
    assert found.unfinished == ()
    assert found.num_objects == len(reported) == len(named) + len(means)
    assert found.num_bytes == sum(num_bytes for num_bytes, _ in reported) == reported[0][1]


def test_a_flipped_byte_is_found(run: Run) -> None:
    """The object, the digest that it should have, and how to make it again."""
    store, run_uri = run
    for step in STEPS:
        output = outputs(store, run_uri, step)[0]
        rewrite(run, output.key, lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:])
        (finding,) = verify(store, run_uri).findings
        assert finding.object == output.key
        assert output.sha256[:16] in finding.expected
        assert output.sha256[:16] not in finding.found.partition("(")[0]
        assert f"remove {step}/{SUBSET}/commits/" in finding.remedy
        rewrite(run, output.key, lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:])


def test_a_damaged_manifest_is_found(run: Run) -> None:
    """Bytes that do not match their own seal; the steps that read it are not blamed."""
    key = f"features/{SUBSET}/manifest.json"
    rewrite(run, key, lambda data: data.replace(b'"utterances"', b'"utterancez"', 1))
    found = findings(run)
    assert found.keys() == {key}
    assert found[key][0] == "a whole record"


@pytest.mark.parametrize(
    ("step", "changes", "expected", "found"),
    [
        ("features", {"code_version": "99"}, f"/{SUBSET} read it", "SHA-256"),
        ("partitions", {"step": "elsewhere"}, f"partitions/{SUBSET}", "of elsewhere"),
    ],
)
def test_an_altered_manifest_is_found(
    run: Run, step: str, changes: dict[str, object], expected: str, found: str
) -> None:
    """Sealed again after a change: what was made from it knows what it read, as its folder does."""
    rewrite_manifest(run, step, **changes)
    said = findings(run)[f"{step}/{SUBSET}/manifest.json"]
    assert expected in said[0]
    assert said[1].startswith(found)


def test_changed_inputs_are_found(run: Run) -> None:
    """Targets without their teacher, other metadata than selection read, and metadata more.

    Marks of the metadata's writer do not count.
    """
    store, run_uri = run
    uri = store.list(join_uri(run_uri, "corpus", "metadata"))[0].uri
    folder = join_uri(run_uri, "corpus", "metadata", SUBSET)
    store.put(join_uri(folder, "_SUCCESS"), b"")
    assert findings(run) == {}
    store.delete(manifest_uri(run_uri, "models/teacher"))
    store.put(join_uri(folder, "later.jsonl"), b"")
    store.put(uri, store.get(uri) + b"\n")
    found = findings(run)
    assert found["models/teacher/manifest.json"][1] == "missing"
    assert "as selected from" in found[uri][0]
    assert found[join_uri(folder, "later.jsonl")] == (
        f"only what selection/{SUBSET} read",
        "an object that it did not read",
    )
    store.delete(uri)
    assert findings(run)[uri][1] == "missing"


@pytest.mark.parametrize("section", [{}, {"tuning": {}}])
def test_a_changed_language_model_is_found(run: Run, section: dict[str, object]) -> None:
    """A model in the corpus has no manifest; it is compared with what decoding read."""
    store, run_uri = run
    uri = join_uri(run_uri, "corpus", "lm.arpa")
    store.put(uri, b"a model")
    settings = {"arpa": "lm.arpa", "language_model_text": ""}
    config = {"evaluation": settings, **section} if section else settings
    spec = StepSpec(store, run_uri, EVALUATION_STEP, config, [], {"arpa": sha256(b"a model")})

    def score(step: StepRun) -> Manifest:
        output = step.context.put_output("s", ".json", b"{}", Tally())
        return step.lossless(Tally(), (output,))

    run_step(spec, score)
    assert findings(run) == {}
    store.put(uri, b"another model")
    assert findings(run).keys() == {uri}
    assert f"as {EVALUATION_STEP} read it" in findings(run)[uri][0]


def spoken(run: Run) -> tuple[str, str]:
    """The audio of a row of features: its URI, and its ETag."""
    store, run_uri = run
    data = store.get(join_uri(run_uri, outputs(store, run_uri, "features")[0].key))
    row = read_features(data)[0]
    return join_uri(run_uri, "corpus", row.audio_uri), row.audio_etag


def test_changed_audio_is_found(run: Run) -> None:
    """A byte of a corpus without a manifest: the ETag that extraction recorded, and the one now."""
    store, _ = run
    uri, etag = spoken(run)
    audio = store.get(uri)
    store.put(uri, audio[:100] + bytes([audio[100] ^ 1]) + audio[101:])
    found = findings(run)
    assert found.keys() == {uri}
    assert found[uri][0] == f"ETag {etag}, as features/{SUBSET} read it"
    assert found[uri][1].startswith("ETag ")
    store.delete(uri)
    assert findings(run)[uri][1] == "missing"
    store.put(uri, audio)
    assert findings(run) == {}


def test_much_changed_audio_is_counted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many objects the first are named, and the others are counted: a moved folder."""
    monkeypatch.setattr(corpus_objects, "MAX_NAMED", 3)
    store, run_uri = run
    for found in store.list(join_uri(run_uri, "corpus", "audio")):
        store.delete(found.uri)
    reported = findings(run)
    others = read_manifest(store, run_uri, f"features/{SUBSET}").tally_out.utterances - 3
    assert len(reported) == 4
    message = f"{others} more audio objects are not as features/{SUBSET} read them"
    assert reported[join_uri(run_uri, "corpus")][1] == message


def test_audio_that_nothing_read_may_change(run: Run) -> None:
    """Unselected audio of a corpus that was not ingested here is no part of the run."""
    store, run_uri = run
    selected = {f"audio/{name}.flac" for name in selected_ids(store, run_uri)}
    base = join_uri(run_uri, "corpus")
    for found in store.list(join_uri(base, "audio")):
        if found.uri.removeprefix(f"{base}/") not in selected:
            store.put(found.uri, b"other")
    assert findings(run) == {}


def test_blanks_in_a_sealed_record_are_found(run: Run) -> None:
    """Bytes that no writer wrote, though they say the same."""
    key = first_commit(run, "targets")
    rewrite(run, key, lambda data: data + b"\n")
    assert "other blanks" in findings(run)[key][1]


def test_subsets_of_an_older_run_are_compared(run: Run) -> None:
    """A held-out selection with a speaker of training, made before selections were compared."""
    store, run_uri = run
    for found in store.list(join_uri(run_uri, "selection", SUBSET)):
        store.put(found.uri.replace(SUBSET, "heldout"), store.get(found.uri))
    step = f"selection/{SUBSET}"
    for found in store.list(join_uri(run_uri, "selection", "heldout")):
        if "/scratch/" not in found.uri and found.uri.endswith(".json"):
            data = store.get(found.uri).decode().replace(step, "selection/heldout")
            document = json.loads(data)
            del document["sha256"]
            indent = 1 if found.uri.endswith("manifest.json") else None
            store.put(found.uri, seal(document, indent))
    reported = [
        (each.expected, each.found)
        for each in verify(store, run_uri).findings
        if each.object == "selection/heldout/manifest.json"
    ]
    expected = f"nothing shared with selection/{SUBSET}"
    assert [each for each, _ in reported] == [expected, expected]
    num_utterances = len(selected_ids(store, run_uri))
    assert reported[0][1].startswith(f"{num_utterances} utterances: {SUBSET}-")
    assert reported[1][1].startswith(f"6 speakers: {SUBSET}-speaker-")


def test_a_wrong_count_in_a_commit_is_found(run: Run) -> None:
    """Its own sum, and the manifest's; in another, another recipe than the manifest's."""
    other = first_commit(run, "partitions")
    rewrite_commit(run, other, lambda commit: replace(commit, fingerprint="0" * 64))
    key = first_commit(run, "targets")
    rewrite_commit(run, key, lambda commit: replace(commit, tally_in=Tally(99, 1)))
    found = findings(run)
    assert found[other][1] == "0" * 12
    assert found[key][0].startswith("99 utterances, 1 ms accounted for")
    assert found[f"targets/{SUBSET}/manifest.json"][0].endswith(" in, as stated")


def test_a_missing_commit_is_found(run: Run) -> None:
    """The manifest names what no commit does."""
    store, run_uri = run
    key = first_commit(run, "features")
    output = Commit.from_bytes(store.get(join_uri(run_uri, key))).outputs[0]
    store.delete(join_uri(run_uri, key))
    found = findings(run)
    assert found[output.key] == ("named alike by a commit", "by the manifest alone")
    assert found[key] == ("there, as the manifest names its objects", "missing")


def test_a_commit_that_the_manifest_forgot_is_found(run: Run) -> None:
    """An output that no manifest names is no orphan: a commit names it."""
    store, run_uri = run
    key = first_commit(run, "partitions")
    extra = Output(f"partitions/{SUBSET}/00/extra-{'0' * 16}.parquet", 1, "0" * 64, 0, 0)
    store.put(join_uri(run_uri, extra.key), b"x")
    rewrite_commit(run, key, lambda each: replace(each, outputs=(*each.outputs, extra)))
    found = verify(store, run_uri)
    assert extra.key in {finding.object for finding in found.findings}
    assert extra.key not in found.orphans


def replace_shard(
    run: Run, number: int, change: Callable[[list], list], num_invented: int = 0
) -> Output:
    """Rewrite a feature shard and all that names it, as a liar would; the new object."""
    store, run_uri = run
    old = outputs(store, run_uri, "features")[number]
    rows = change(read_features(store.get(join_uri(run_uri, old.key))))
    data = write_features(rows)
    digest = sha256(data)
    duration_ms = sum(row.duration_ms for row in rows)
    name = Path(old.key).name.partition("-")[0]
    key = f"features/{SUBSET}/{digest[:2]}/{name}-{digest[:16]}.parquet"
    new = Output(key, len(data), digest, len(rows) + num_invented, duration_ms)
    store.put(join_uri(run_uri, key), data)
    store.delete(join_uri(run_uri, old.key))

    def renamed(record: Commit | Manifest) -> tuple[Output, ...]:
        return tuple(new if output == old else output for output in record.outputs)

    for found in store.list(join_uri(run_uri, "features", SUBSET, "commits")):
        commit_key = found.uri[len(run_uri) + 1 :]
        rewrite_commit(run, commit_key, lambda commit: replace(commit, outputs=renamed(commit)))
    manifest = read_manifest(store, run_uri, f"features/{SUBSET}")
    rewrite_manifest(run, "features", outputs=renamed(manifest))
    return new


def test_a_doubled_utterance_is_found(run: Run) -> None:
    """One row's id becomes that of a row in another shard: reported by name, as is the lost one."""
    store, run_uri = run
    first, second = (
        read_features(store.get(join_uri(run_uri, output.key)))
        for output in outputs(store, run_uri, "features")[:2]
    )
    twice, lost = first[0].utterance_id, second[0].utterance_id
    replace_shard(run, 1, lambda rows: [replace(rows[0], utterance_id=twice), *rows[1:]])
    reported = [f"{each.expected}: {each.found}" for each in verify(store, run_uri).findings]
    assert f"each utterance once in features/{SUBSET}: 1 more than once: {twice}" in reported
    assert f"the utterances of selection/{SUBSET}: 1 lost: {lost}" in reported


def test_an_invented_utterance_is_found(run: Run) -> None:
    """Counts and digests agree, the ids do not; nor does the count of another shard."""
    store, run_uri = run
    replace_shard(run, 0, lambda rows: [replace(rows[0], utterance_id="nobody"), *rows[1:]])
    new = replace_shard(run, 1, lambda rows: rows, num_invented=1)
    reported = {each.found: each for each in verify(store, run_uri).findings}
    assert "1 not from there: nobody" in reported
    expected, found = findings(run)[new.key]
    assert expected.startswith(f"{new.utterances} utterances, ")
    assert found.startswith(f"{new.utterances - 1} utterances, ")


def test_a_wrong_count_of_a_reason_is_found(run: Run) -> None:
    """A ledger's record counts another reason than its lines, in commit and manifest alike."""
    store, run_uri = run
    manifest = read_manifest(store, run_uri, f"features/{SUBSET}")
    ledger = manifest.ledgers[0]
    (reason, count), *others = ledger.reasons.items()
    wrong = replace(ledger, reasons={**dict(others), "bad_luck": count})

    def recount(commit: Commit) -> Commit:
        return replace(commit, ledger=wrong) if commit.ledger == ledger else commit

    for key in (each.uri for each in store.list(join_uri(run_uri, f"features/{SUBSET}/commits"))):
        rewrite_commit(run, key.removeprefix(f"{run_uri}/"), recount)
    ledgers = tuple(wrong if each == ledger else each for each in manifest.ledgers)
    rewrite_manifest(run, "features", ledgers=ledgers)
    expected, found = findings(run)[ledger.key]
    assert expected.endswith(f"{count} bad_luck")
    assert f"{count} {reason}" in found


@pytest.mark.parametrize("is_forgotten", [True, False])
def test_a_wrong_id_index_is_found(run: Run, is_forgotten: bool) -> None:
    """An entry is forgotten, or points to another object; sizes and digests are as recorded."""
    store, run_uri = run
    manifest = read_manifest(store, run_uri, f"selection/{SUBSET}")
    (output,) = manifest.id_index
    index = IdRange.from_bytes(store.get(join_uri(run_uri, output.key)))
    objects = index.objects.copy()
    place = int(np.flatnonzero(objects >= len(manifest.inputs))[0])
    objects[place] += 1
    wrong = IdRange(index.hashes, objects)
    if is_forgotten:
        wrong = IdRange(np.delete(index.hashes, place), np.delete(objects, place))
    data = wrong.to_bytes()
    store.put(join_uri(run_uri, output.key), data)
    altered = replace(output, num_bytes=len(data), sha256=sha256(data))
    rewrite_manifest(run, "selection", id_index=(altered,))
    expected, found = findings(run)[output.key]
    entries = int((index.objects >= len(manifest.inputs)).sum())
    assert expected.startswith(f"{entries} entries for the ids")
    assert found.startswith(f"{entries - is_forgotten}, or at other objects")


def orphan(run: Run, step: str) -> str:
    """An object such as a killed task leaves: stored, never committed."""
    store, run_uri = run
    key = f"{step}/{SUBSET}/ab/000000-{'ab' * 8}.parquet"
    store.put(join_uri(run_uri, key), b"never committed")
    return key


def test_sweeping_removes_exactly_the_orphans(run: Run) -> None:
    """Uncommitted objects, a killed writer's file, the selection's scratch; nothing else."""
    store, run_uri = run
    before = {info.uri for info in store.list(run_uri)}
    partial = Path(run_uri, "features", SUBSET, ".partial-0123")
    partial.write_bytes(b"half")
    added = {orphan(run, step) for step in STEPS}
    found = verify(store, run_uri)
    scratch = {key for key in (uri[len(run_uri) + 1 :] for uri in before) if "/scratch/" in key}
    assert set(found.scratch) == scratch
    assert set(found.orphans) == added | {f"features/{SUBSET}/.partial-0123"}
    assert found.findings == ()
    sweep(store, run_uri, found)
    assert not partial.exists()
    after = {info.uri for info in store.list(run_uri)}
    assert before - after == {join_uri(run_uri, key) for key in scratch}
    swept = verify(store, run_uri)
    assert (swept.findings, swept.orphans, swept.scratch) == ((), (), ())


def test_a_strangers_object_is_named_and_never_swept(run: Run) -> None:
    """The user must find out what an object is for that no task stored."""
    store, run_uri = run
    key = f"features/{SUBSET}/notes.txt"
    store.put(join_uri(run_uri, key), b"mine")
    assert findings(run)[key][1] == "an object that no task stored"
    with pytest.raises(ValueError, match=r"nothing swept: 1 findings"):
        sweep(store, run_uri, verify(store, run_uri))
    assert store.exists(join_uri(run_uri, key))


def test_nothing_is_swept_while_a_step_is_unfinished(run: Run) -> None:
    """Objects that its tasks store look like orphans until they commit."""
    store, run_uri = run
    store.delete(manifest_uri(run_uri, f"partitions/{SUBSET}"))
    key = orphan(run, "features")
    found = verify(store, run_uri)
    assert found.unfinished == (f"partitions/{SUBSET}",)
    with pytest.raises(ValueError, match=rf"nothing swept: partitions/{SUBSET} unfinished"):
        sweep(store, run_uri, found)
    assert store.exists(join_uri(run_uri, key))


def test_what_only_a_damaged_commit_names_is_not_swept(run: Run) -> None:
    """Its objects look like orphans, and are the run's."""
    store, run_uri = run
    key = first_commit(run, "features")
    rewrite(run, key, lambda data: data[:40])
    assert findings(run)[key][0] == "a whole record"
    with pytest.raises(ValueError, match="nothing swept"):
        sweep(store, run_uri, verify(store, run_uri))


def test_a_step_at_work_is_unfinished_even_before_its_first_commit(run: Run) -> None:
    """An object in a folder without manifest and commits; audio of such a name is none."""
    store, run_uri = run
    store.put(join_uri(run_uri, f"corpus/audio/ab/voice-{'ab' * 8}.flac"), b"")
    assert (verify(store, run_uri).unfinished, verify(store, run_uri).orphans) == ((), ())
    store.put(join_uri(run_uri, f"targets/heldout/ab/000000-{'ab' * 8}.parquet"), b"")
    assert verify(store, run_uri).unfinished == ("targets/heldout",)


def test_tasks_find_what_one_process_finds(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that are flipped, gone, doubled or miscounted: the same findings, in one order."""
    monkeypatch.setattr(stored_objects, "GROUP_OBJECTS", 2)
    monkeypatch.setattr(stored_objects, "GROUPS_AT_A_TIME", 2)
    monkeypatch.setattr(corpus_objects, "_GROUP_OBJECTS", 1)
    store, run_uri = run
    corpus_uri = join_uri(run_uri, "corpus")
    names: list[str] = []

    def by_tasks(elements: Sequence[Any], function: Any, name: str) -> list[Any]:
        names.append(name)
        sent = pickle.loads(pickle.dumps((list(elements), function)))
        return pickle.loads(pickle.dumps([sent[1](each) for each in sent[0]]))  # type: ignore[no-any-return]

    def compare() -> Verification:
        seen: list[list[tuple[int, int]]] = [[], []]
        alone, spread = (
            verify_run(
                store,
                run_uri,
                corpus_uri,
                lambda *reported, into=into: into.append(reported),
                distribute=by,
            )
            for into, by in zip(seen, (None, by_tasks), strict=True)
        )
        assert spread == alone
        assert seen[0] == seen[1]
        return alone

    assert compare().findings == ()
    assert len(names) > len(STEPS)
    # No listing confirms local audio, nor segments of recordings.
    assert names.count("verify audio") == 1
    assert names.count(f"verify the metadata of selection/{SUBSET}") == 1
    metadata = store.list(metadata_uri(corpus_uri, SUBSET))[0]
    store.put(metadata.uri, store.get(metadata.uri) + b"\n")
    rewrite(run, outputs(store, run_uri, "targets")[0].key, lambda data: data[:-1])
    store.delete(join_uri(run_uri, outputs(store, run_uri, "partitions")[-1].key))
    audio = store.list(join_uri(corpus_uri, "audio"))[0]
    store.put(audio.uri, b"other audio")
    (first, *_), key = outputs(store, run_uri, "features"), f"features/{SUBSET}/manifest.json"
    rewrite_manifest(
        run,
        "features",
        outputs=tuple(
            replace(each, utterances=each.utterances + 1) if each == first else each
            for each in outputs(store, run_uri, "features")
        ),
    )
    named = {each.object for each in compare().findings}
    assert len(named | {key}) > 5
    assert metadata.uri in named


def test_few_folders_of_audio_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """None within another; where each speaker has one, that of all; none above a prefix."""
    nested = {"s3://b/a/x", "s3://b/a", "s3://b/ab", "s3://b/a/x/y"}
    assert corpus_objects.outermost(nested, ["s3://b"]) == ["s3://b/a", "s3://b/ab"]
    monkeypatch.setattr(corpus_objects, "MAX_FOLDERS", 3)
    speakers = {f"s3://b/audio/{number}" for number in range(9)}
    prefixes = ["s3://b/audio", "s3://other/x"]
    for others in ([], ["s3://other/x"], ["s3://b/audio"]):
        expected = sorted({"s3://b/audio", *others})
        assert corpus_objects.outermost({*speakers, *others}, prefixes) == expected
    apart = [f"s3://b/{number}" for number in range(9)]
    assert corpus_objects.outermost(apart, apart) == apart
