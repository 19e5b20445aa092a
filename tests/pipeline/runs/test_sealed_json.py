"""Our own JSON carries its digest: damage at rest is named, with the object and what to do."""

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.store.object_store import ObjectStore
from pipeline.records import Tally
from pipeline.runs.commit import Commit, committed_tasks, step_context
from pipeline.runs.engine import finished_manifest
from pipeline.runs.manifest import Manifest, manifest_uri, read_manifest
from pipeline.runs.sealed_json import (
    NamedObject,
    named_objects,
    naming,
    seal,
    unseal,
    unseal_exactly,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=10,
)
DOCUMENTS = st.dictionaries(st.text().filter(lambda key: key != "sha256"), JSON)


@settings(max_examples=40, deadline=None)
@given(DOCUMENTS)
def test_what_is_sealed_comes_back(document: dict[str, object]) -> None:
    """Any JSON object, and the same bytes for the same document."""
    data = seal(document)
    assert unseal(data, "") == document
    assert seal(unseal(data, ""), indent=1) == seal(document, indent=1)


def opened(data: bytes) -> object:
    """Return the content of `data`, or "refused" if the error ends in the remedy."""
    try:
        return unseal(data, "do it again")
    except ValueError as error:
        return "refused" if str(error).endswith(": do it again") else error


def test_any_changed_byte_is_found_or_means_the_same() -> None:
    """Each byte of a record changed in three ways: a ValueError with the remedy, or no change."""
    document = {"task": "000001", "tally": {"utterances": 12, "duration_ms": 3600}, "mean": 0.25}
    data = seal(document)
    found = [
        opened(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
        for place in range(len(data))
        for bit in (1, 16, 128)
    ]
    assert {str(each) for each in found} <= {str(document), "refused"}
    assert found.count("refused") > 0.98 * len(found)


def test_keys_that_are_numbers_become_text_before_the_digest() -> None:
    """JSON's keys are text, and sort as such."""
    assert unseal(seal({"counts": {10: "a", 9: "b"}}), "") == {"counts": {"10": "a", "9": "b"}}


def test_the_text_is_canonical_json_with_its_sha_256() -> None:
    """Sorted keys, the digest of the others among them, a newline; indented for readers."""
    digest = hashlib.sha256(b'{"a": [1], "z": 2}').hexdigest()
    line = f'{{"a": [1], "sha256": "{digest}", "z": 2}}\n'
    assert seal({"z": 2, "a": [1]}) == line.encode()
    indented = f'{{\n "a": [\n  1\n ],\n "sha256": "{digest}",\n "z": 2\n}}\n'
    assert seal({"z": 2, "a": [1]}, indent=1) == indented.encode()


def test_an_error_says_what_is_wrong_and_what_to_do() -> None:
    """Both digests, or how the JSON is broken; then the remedy."""
    digest, stated = (
        hashlib.sha256(b'{"a": 2}').hexdigest(),
        hashlib.sha256(b'{"a": 1}').hexdigest(),
    )
    wrong = f"^SHA-256 of what it says is {digest}, it states {stated}: do it again$"
    with pytest.raises(ValueError, match=wrong):
        unseal(seal({"a": 1}).replace(b'"a": 1', b'"a": 2'), "do it again")
    with pytest.raises(ValueError, match=r"of its own \('sha256'\): do it again$"):
        unseal(b"{}", "do it again")


def altered(data: bytes) -> bytes:
    """The same JSON with another number in it, and its old digest."""
    document = json.loads(data)
    document["tally_in"]["utterances"] += 1
    return json.dumps(document).encode()


@pytest.mark.parametrize("damage", [altered, lambda data: data[:-9], lambda _: b"", lambda _: b"3"])
def test_a_damaged_commit_record_is_named(tmp_path: Path, damage) -> None:
    """When the step resumes, and when a second attempt finds it: the URI and what to remove."""
    store, run_uri = ObjectStore((str(tmp_path),)), str(tmp_path)
    context = step_context(store, run_uri, "features/x", {}, {})
    record = Commit("0", context.fingerprint, (), None, Tally(), Tally())
    context.commit(record)
    uri = f"{run_uri}/features/x/commits/0.json"
    store.put(uri, damage(store.get(uri)))
    for read in (lambda: committed_tasks(context), lambda: context.commit(record)):
        with pytest.raises(ValueError, match=rf"{uri}: .*remove it and run its step") as caught:
            read()
        assert "commit record is damaged" in str(caught.value)


@pytest.mark.parametrize("damage", [altered, lambda data: data[:-9], lambda _: b"", lambda _: b"3"])
def test_a_damaged_manifest_is_named(tmp_path: Path, damage) -> None:
    """By the step that reads it, and by its own: the URI and what to remove."""
    store, run_uri = ObjectStore((str(tmp_path),)), str(tmp_path)
    context = step_context(store, run_uri, "features/x", {}, {})
    uri = manifest_uri(run_uri, "features/x")
    store.put(uri, damage(Manifest("features/x", {}, {}, ()).to_bytes()))
    for read in (
        lambda: read_manifest(store, run_uri, "features/x"),
        lambda: finished_manifest(context, {}, {}),
    ):
        with pytest.raises(ValueError, match=rf"{uri}: .*remove it and run its step again"):
            read()


@settings(max_examples=20, deadline=None)
@given(DOCUMENTS, st.sampled_from([None, 1]))
def test_sealed_bytes_are_the_writers_own(document: dict[str, object], indent: int | None) -> None:
    """Both of the writer's layouts are read; another blank, which says the same, is refused."""
    data = seal(document, indent)
    assert unseal_exactly(data, "") == unseal(data, "")
    for other in (data + b"\n", data[:-1], b" " + data):
        assert unseal(other, "") == document
        with pytest.raises(ValueError, match="other blanks than its writer's: look"):
            unseal_exactly(other, "look")


def test_a_sealed_document_names_objects() -> None:
    """Key, size and SHA-256 come back, in order; a document without names has none."""
    objects = (NamedObject.of("b", b"two"), NamedObject.of("a", b""))
    sealed = seal(naming({"step": 1}, objects))
    assert named_objects(unseal(sealed, "")) == objects
    assert unseal(sealed, "")["step"] == 1
    assert objects[0] == NamedObject("b", 3, hashlib.sha256(b"two").hexdigest())
    assert named_objects({}) == ()
