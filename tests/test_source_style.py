"""The house rules of names and words hold: folders, file names, small files, docstrings, words."""

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.source_trees import sources, trees

STEPS = Path("jobs")  # one file a step, named by its verb
MAX_MODULES = 13
MIN_LINES = 40
SMALL_FILES = {
    "infra/spark/standard_error.py": "programs call it before they import pyspark, or without it",
    "pipeline/shards/quantization.py": "the equations of features in one byte",
    "training/algorithms/sparsification/code_words.py": "the format of codes in words",
    "training/algorithms/sparsification/elias_fano.py": "the code of Elias and Fano",
}
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


def importers() -> dict[Path, set[Path]]:
    """Return the files of the packages that import each module, by the module's path."""
    found: dict[Path, set[Path]] = defaultdict(set)
    for path, tree in trees().items():
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                found[Path(*name.split(".")).with_suffix(".py")].add(path)
    return found


def test_folders_are_small() -> None:
    """No folder has more than 13 modules, except for the steps that can be run."""
    sizes = Counter(path.parent for path in modules() if path.parent != STEPS)
    assert {str(folder): size for folder, size in sizes.items() if size > MAX_MODULES} == {}


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


def test_small_files_have_several_importers() -> None:
    """A file below 40 lines with one importer is merged into it, or listed here with a reason."""
    users = importers()
    small = {
        str(path)
        for path in modules()
        if len(sources()[path].splitlines()) < MIN_LINES and len(users[path]) == 1
    }
    assert small == set(SMALL_FILES)


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
