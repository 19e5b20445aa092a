"""Our own JSON carries its digest: damage at rest is named, with the object and what to do."""

import hashlib
import json
from collections.abc import Callable
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
def test_damage_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    """Of a commit, when its step resumes or makes it again, and of a manifest: what to remove."""
    store, run_uri = ObjectStore((str(tmp_path),)), str(tmp_path)
    context = step_context(store, run_uri, "features/x", {}, {})
    record = Commit("0", context.fingerprint, (), None, Tally(), Tally())
    context.commit(record)
    commit, manifest = f"{run_uri}/features/x/commits/0.json", manifest_uri(run_uri, "features/x")
    store.put(manifest, Manifest("features/x", {}, {}, ()).to_bytes())
    for uri in (commit, manifest):
        store.put(uri, damage(store.get(uri)))
    for uri, read in (
        (commit, lambda: committed_tasks(context)),
        (commit, lambda: context.commit(record)),
        (manifest, lambda: read_manifest(store, run_uri, "features/x")),
        (manifest, lambda: finished_manifest(context, {}, {})),
    ):
        with pytest.raises(ValueError, match=rf"{uri}: .*remove it and run its step again"):
            read()


@settings(max_examples=30, deadline=None)
@given(DOCUMENTS, st.sampled_from([None, 1]))
def test_what_is_sealed_comes_back(document: dict[str, object], indent: int | None) -> None:
    """Any JSON object, in both of the writer's layouts; exact readers refuse another blank."""
    data = seal(document, indent)
    assert unseal_exactly(data, "") == unseal(data, "") == document
    assert seal(unseal(data, ""), indent) == data
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
