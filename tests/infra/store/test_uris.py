from pathlib import Path
from posixpath import normpath
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.store.object_store import ObjectStore, PrefixError
from infra.store.uris import join_uri, normalize_uri, require_within, resolve_prefix


@pytest.mark.parametrize(
    ("base", "parts", "expected"),
    [
        ("s3://bucket/a/", ("b", "c"), "s3://bucket/a/b/c"),
        ("s3://bucket", ("/b/", "", "c.json"), "s3://bucket/b/c.json"),
        ("/", ("a",), "/a"),
        ("runs", ("a",), "runs/a"),
    ],
)
def test_join_uri(base: str, parts: tuple[str, ...], expected: str) -> None:
    """Parts join by single slashes and never replace the base."""
    assert join_uri(base, *parts) == expected


def test_join_uri_needs_a_base() -> None:
    """An empty base would silently become the root directory."""
    with pytest.raises(ValueError, match="base = ''"):
        join_uri("", "a")


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket/pre",
        "s3://bucket/pre/",
        "s3://bucket/pre/a",
        "s3://bucket/pre/a..b/...",
        "s3://bucket/pre/100%/?versionId=1#x",
    ],
)
def test_uris_at_or_below_the_prefix_are_allowed(uri: str) -> None:
    """The prefix itself and keys below it pass, strange letters included."""
    for prefix in ("s3://bucket/pre", "s3://bucket/pre/", "s3://bucket"):
        assert require_within(uri, [resolve_prefix(prefix)]) == uri.rstrip("/")


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket/prefix2/a",
        "s3://bucket",
        "s3://bucket//pre/a",
        "s3://bucket2/pre/a",
        "s3://bucket/pre/../other",
        "s3://bucket/pre/./a",
        "s3://bucket/pre/%2e%2e/other",
        "s3://bucket/pre/%252E%252e/other",
        "s3://bucket/pre/..%2fother",
        "s3://bucket/pre/..\\other",
        "s3://bucket/pre/\x00",
        "s3:///pre/a",
        "s3://",
        "/bucket/pre/a",
        "file://s3/pre",
        "",
    ],
)
def test_uris_elsewhere_are_refused(uri: str) -> None:
    """Siblings, other buckets and schemes, traversal plain or encoded, and nonsense are refused."""
    with pytest.raises(PrefixError):
        require_within(uri, [resolve_prefix("s3://bucket/pre")])


@pytest.mark.parametrize(
    "uri",
    [
        "s3:/bucket/key",
        "s3a:/bucket/key",
        "s3//bucket/key",
        " s3://bucket/key",
        "'s3://bucket/key'",
        "/s3://bucket/key",
        "/data/s3:/bucket/key",
        "file:///data/s3:/bucket/key",
        "s3://bucket/corpus/s3:/other/key",
        "file:/data",
        "runs/https:/host/key",
    ],
)
def test_a_uri_with_a_slip_is_no_local_path(uri: str) -> None:
    """A slash forgotten, or lost where paths were joined, makes no folder named s3:."""
    with pytest.raises(PrefixError, match=r"need s3://bucket/key, with two slashes"):
        normalize_uri(uri)


@pytest.mark.parametrize("scheme", ["S3", "s3a", "s3n", "http", "https", "gs", "hdfs"])
def test_other_schemes_are_named(scheme: str) -> None:
    """The message holds the scheme that is meant."""
    need = rf"unknown scheme {scheme}://, need s3://bucket/key or a local path"
    with pytest.raises(PrefixError, match=need):
        normalize_uri(f"{scheme}://bucket/key")


@pytest.mark.parametrize(
    "path", ["/data/12:30/run", "/data/s3/x", "/data/as3:/x", "/data/file:1.wav", "/data/s3-/x"]
)
def test_colons_are_letters_of_local_paths(path: str) -> None:
    """Only what is no path by its look is refused."""
    assert normalize_uri(path) == path


@pytest.mark.parametrize("uri", ["/a\x1b[2J", "/a\x9b2J", "file:///a%1b]0;title%07", "/\ud800"])
def test_what_a_terminal_obeys_is_no_uri(uri: str) -> None:
    """Encoded or not, nor what no file system's name can be; the message is printable."""
    with pytest.raises(PrefixError, match="printable") as refused:
        normalize_uri(uri)
    assert str(refused.value).isprintable()


def test_the_refusal_names_what_is_allowed() -> None:
    """The message holds the URI and the allowed prefixes."""
    with pytest.raises(PrefixError, match=r"/b: outside the allowed prefixes \(/a\)"):
        require_within("/b", ["/a"])
    with pytest.raises(PrefixError, match=r"allowed prefixes \(none\)"):
        require_within("/b", [])


def test_local_spellings_are_one_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative, absolute and file: spellings normalize to one absolute path."""
    monkeypatch.chdir(tmp_path)
    path = str(tmp_path / "a b")
    spellings = ("a b", "a b/", "./x/../a b", path, f"file://{tmp_path}/a%20b")
    spellings += (f"file:///{tmp_path}//a%20b/", f"file://{tmp_path}/./a b")
    assert {normalize_uri(spelling) for spelling in spellings} == {path}
    assert normalize_uri("/") == normalize_uri("file:///") == normalize_uri("file:////") == "/"


def test_a_store_keeps_its_prefix_when_the_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative prefix is taken from the working directory where the store was made."""
    monkeypatch.chdir(tmp_path)
    store = ObjectStore(("data",))
    monkeypatch.chdir("/")
    store.put(f"{tmp_path}/data/a", b"a")
    with pytest.raises(PrefixError):
        store.get("data/a")


def test_symlinks_are_resolved_before_the_check(tmp_path: Path) -> None:
    """A link out of the prefix is refused for reading and writing; a link to the prefix works."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (inside / "file").symlink_to(outside / "secret")
    (inside / "directory").symlink_to(outside)
    (tmp_path / "alias").symlink_to(inside)
    store = ObjectStore((str(tmp_path / "alias"),))
    for uri in (inside / "file", inside / "directory" / "secret", inside / ".." / "outside"):
        with pytest.raises(PrefixError):
            store.get(str(uri))
    with pytest.raises(PrefixError):
        store.put(str(inside / "directory" / "new"), b"")
    store.put(str(tmp_path / "alias" / "own"), b"own")
    assert store.get(str(inside / "own")) == b"own"
    assert list((outside).iterdir()) == [outside / "secret"]


@given(st.text(st.sampled_from("ab./%2eE\\5c"), max_size=12))
def test_no_spelling_leaves_the_prefix(tail: str) -> None:
    """An appended path is refused or stays below its prefix, also once it is decoded."""

    for prefix in ("s3://bucket/pre", "/nowhere/pre"):
        try:
            uri = require_within(f"{prefix}/{tail}", [prefix])
        except PrefixError:
            continue
        path = normpath(unquote(uri).removeprefix("s3:/"))
        assert f"{path}/".startswith(prefix.removeprefix("s3:/") + "/")
