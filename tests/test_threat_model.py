"""docs/threat_model.md names tests that exist, and other documents name the page."""

import ast
import re

from tests.source_trees import REPOSITORY

PAGE = REPOSITORY / "docs/threat_model.md"
_NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def test_every_named_test_exists() -> None:
    """A file of tests, or a function in it: a defence without its test is not claimed."""
    named = _NAMED.findall(PAGE.read_text())
    assert len(named) > 20
    missing = [f"{path}::{name}" for path, name in named if name not in _tests_of(path)]
    assert missing == []


def _tests_of(path: str) -> set[str]:
    """Return the names of a file's tests, and the empty name, which stands for the file."""
    tree = ast.parse((REPOSITORY / path).read_text())
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    found = {name for name in names if name.startswith("test_")}
    assert found, path
    return {"", *found}


def test_other_documents_name_the_page() -> None:
    """SECURITY.md and the README."""
    assert "(docs/threat_model.md)" in (REPOSITORY / "SECURITY.md").read_text()
    assert "(docs/threat_model.md)" in (REPOSITORY / "README.md").read_text()
