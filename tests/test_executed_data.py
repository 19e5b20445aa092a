"""Nothing that a store holds is unpickled, evaluated or given to a shell."""

import ast
import builtins
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.source_trees import REPOSITORY, dotted, imported, trees

MODULES = {
    *("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal"),
    *("shelve", "code", "codeop", "torch.serialization", "torch.hub", "torch.jit", "pandas"),
}
"""Modules whose readers make any object of bytes, or run what they read."""

CALLS = {
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.load", "torch.save"),
    *("numpy.loadtxt", "logging.config.listen", "runpy.run_path"),
}
BUILTINS = {"eval", "exec", "compile", "__import__"}

EXCEPTIONS: dict[str, str] = {
    # File and what it uses: the reason. Spark and multiprocessing pickle functions between the
    # processes of one user; they do so within libraries, and read nothing from the store.
}


def executed(tree: ast.AST) -> Iterator[str]:
    """Yield each use of what executes data: by import, by a module's other name, or built in."""
    names = dict(imported(tree))
    for name in names.values():
        yield from _of_modules(name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            head, _, rest = dotted(node).partition(".")
            used = f"{names.get(head, head)}.{rest}".rstrip(".")
            if used in CALLS or used.removeprefix("builtins.") in BUILTINS:
                yield used
            elif head in names:
                yield from _of_modules(used)
        elif isinstance(node, ast.Call):
            yield from _of_keywords(node)


def _of_modules(name: str) -> Iterator[str]:
    if any(name == each or name.startswith(f"{each}.") for each in MODULES):
        yield name


def _of_keywords(call: ast.Call) -> Iterator[str]:
    for keyword in call.keywords:
        given = ast.unparse(keyword.value)
        if keyword.arg in ("shell", "allow_pickle") and given != "False":
            yield f"{keyword.arg}={given}"
        if keyword.arg == "weights_only" and given != "True":
            yield f"weights_only={given}"


def test_nothing_is_unpickled_or_evaluated() -> None:
    """No shipped module uses one of these, but for named exceptions with a reason."""
    whole = {**trees(), Path("megahour.py"): ast.parse((REPOSITORY / "megahour.py").read_text())}
    used = {f"{file}: {name}" for file, tree in whole.items() for name in executed(tree)}
    assert used == set(EXCEPTIONS)


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "from cloudpickle import dumps",
        "import dill",
        "import marshal",
        "from shelve import open",
        "import torch\ntorch.load(f)",
        "import torch as t\nt.load(f)",
        "from torch import load\nload(f)",
        "import os\nos.system('ls')",
        "from os import popen as p\np('ls')",
        "import yaml\nyaml.load(f)",
        "eval('1')",
        "exec(text)",
        "import builtins\nbuiltins.eval('1')",
        "__import__('x')",
        "import numpy as np\nnp.load(f, allow_pickle=True)",
        "import numpy as np\nnp.load(f, allow_pickle=flag)",
        "import subprocess\nsubprocess.run('ls', shell=True)",
    ],
)
def test_each_way_is_found(text: str) -> None:
    """By whatever name it is imported."""
    assert list(executed(ast.parse(text)))


def test_harmless_relatives_are_allowed() -> None:
    """A module's eval(), a regular expression's compile() and arrays without objects."""
    text = "import re\nmodel.eval()\nre.compile('x')\nnp.load(f, allow_pickle=False)"
    assert list(executed(ast.parse(text))) == []
    assert set(vars(builtins)) >= BUILTINS
