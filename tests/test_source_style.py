"""The house rules of names and words hold: file names, docstrings, words."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.source_trees import sources, trees

STEPS = Path("jobs")  # one file a step, named by its verb
VAGUE_NAMES = {"base", "common", "helpers", "misc", "util", "utils"}
ENDINGS = re.compile(r"(s|es|ed|er|ers|ing|ings|ion|ions)$")
QUESTION_WORDS = ("What", "Who", "Whoever", "Whose", "Which", "Where", "How", "Why")
BANNED_WORDS = re.compile(
    r"\b(anew|anybody|go(es|ing)? on|mend(s|ed|ing)?|nobody|somebody|told|whoever)\b", re.IGNORECASE
)


def modules() -> list[Path]:
    """Return the files that are not a package's own."""
    return [path for path in sources() if path.name != "__init__.py"]


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield every docstring with its place."""
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield f"{path}:{node.body[0].lineno}", text


def prose() -> Iterator[tuple[str, str]]:
    """Yield every comment, docstring and other string with its place."""
    for path, text in sources().items():
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield f"{path}:{token.start[0]}", token.string
        for node in ast.walk(trees()[path]):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{path}:{node.lineno}", node.value


def test_names_differ_by_more_than_their_ending() -> None:
    """No two names of a folder are one word with two endings, as fit, fits and fitting."""
    names = {
        path.parent if path.name == "__init__.py" else path.with_suffix("") for path in sources()
    }
    stems = defaultdict(set)
    for name in names:
        if name.parent != STEPS:
            stems[name.parent / ENDINGS.sub("", name.name)].add(str(name))
    assert [sorted(same) for same in stems.values() if len(same) > 1] == []
    assert {str(path) for path in modules() if path.stem in VAGUE_NAMES} == set()


def test_docstrings_begin_with_a_verb_or_a_name() -> None:
    """No docstring begins with What, Who, Which, Where, How or Why."""
    found = {
        f"{place}: {text[:80]}"
        for place, text in docstrings()
        if text.split()[0].strip(",:") in QUESTION_WORDS
    }
    assert found == set()


def test_programs_are_not_people() -> None:
    """No comment, docstring or message uses a word of BANNED_WORDS."""
    found = {f"{place}: {text[:80]}" for place, text in prose() if BANNED_WORDS.search(text)}
    assert found == set()
