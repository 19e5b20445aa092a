"""`python -m tests.mutation` changes one thing of a module at a time and looks if a test fails.

Mutants are written into a temporary copy of the working tree. Each is tested in a process forked
from a pytest that has already imported all that the tests need and that does not import the module.
`modules.toml` names the tests of each module, `equivalent.toml` the mutants that no test can tell
from the module.
"""

import argparse
import gc
import importlib
import json
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = os.environ["TRITON_INTERPRET"] = "1"

import hypothesis
import pytest
import torch
from jaxtyping import install_import_hook

from tests.mutation.mutants import Mutant, c_mutants, python_mutants

FOLDER = Path(__file__).parent
TESTS: dict[str, list[str]] = tomllib.loads((FOLDER / "modules.toml").read_text())
EXPLAINED = tomllib.loads((FOLDER / "equivalent.toml").read_text())
PYTEST = "-x -q -s -p no:cacheprovider --noconftest --hypothesis-seed=0"
PYTEST += " --hypothesis-profile=mutation"
COMPILER = "cc -O3 -ffp-contract=off -fno-trapping-math -shared -fPIC"
MAX_BYTES = 12 * 2**30


@contextmanager
def copied_tree() -> Iterator[Path]:
    """Copy the working tree; of what Git ignores, only compiled extensions."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")
    names += map(str, Path("training").rglob("*.so"))
    with tempfile.TemporaryDirectory() as folder:
        for name in filter(os.path.isfile, names):
            copied = Path(folder, name)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(name, copied)
        yield Path(folder)


def compiles(path: Path) -> bool:
    """Compile a C file to where its module looks for it."""
    library = path.with_name(f"_{path.stem}{sysconfig.get_config_var('EXT_SUFFIX')}")
    library.unlink(missing_ok=True)
    command = [*COMPILER.split(), str(path), "-o", str(library)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@dataclass(frozen=True)
class Blocked:
    """A finder of modules that refuses the one to be mutated, and so whatever imports it."""

    name: str

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Raise ImportError for the module, and leave all others to the next finder."""
        if name == self.name or name.startswith(f"{self.name}."):
            raise ImportError(name)
        return None


@dataclass
class Mutations:
    """A pytest plugin: before tests are collected it forks a process for each mutant of a module.

    A fork collects and runs the tests, the fastest first; it imports the module from the file that
    was mutated. The first fork imports the module itself, and records what the others need.
    """

    module: Path
    every: int
    seconds: Counter[str] = field(default_factory=Counter)
    is_first: bool = True

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Return in each fork; leave the process with 1 if a survivor is unexplained."""
        started, source = time.monotonic(), self.module.read_text()
        passed, cpu_s = self._forked(300)
        if passed is None:
            return
        if not passed:
            log = Path("pytest.log").read_text()
            print(f"{self.module}: its tests fail without a mutation\n{log}", flush=True)
            os._exit(1)
        self._learn_from_first()
        survivors, num_mutants = [], 0
        is_c = self.module.suffix == ".c"
        for mutant in (c_mutants if is_c else python_mutants)(source)[:: self.every]:
            self.module.write_text(mutant.source)
            if is_c and not compiles(self.module):
                continue
            num_mutants += 1
            passed, _ = self._forked(5 + round(5 * cpu_s))
            if passed is None:
                return
            if passed:
                survivors.append(mutant)
        self.module.write_text(source)
        assert not is_c or compiles(self.module)
        duration_s = time.monotonic() - started
        os._exit(report(str(self.module), survivors, num_mutants, duration_s))

    def _forked(self, limit_s: int) -> tuple[bool | None, float]:
        """Return None in a fork; afterwards whether its tests passed, and its processor time."""
        gc.freeze()
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            _, status, usage = os.wait4(pid, 0)
            return status == 0, usage.ru_utime + usage.ru_stime
        sys.dont_write_bytecode = not self.is_first
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
        log = os.open("pytest.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        return None, 0.0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Begin with the fastest."""
        items.sort(key=lambda item: self.seconds[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count each test's seconds."""
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Write, in the first fork, what it imported and each test's seconds."""
        if self.is_first:
            Path("first.json").write_text(json.dumps([list(sys.modules), self.seconds]))

    def _learn_from_first(self) -> None:
        """Import what the first fork did, but for the module and its importers."""
        self.is_first = False
        names, seconds = json.loads(Path("first.json").read_text())
        self.seconds.update(seconds)
        parts = self.module.with_suffix("").parts
        blocked = Blocked(".".join(parts[:-1] if self.module.suffix == ".c" else parts))
        sys.meta_path.insert(0, blocked)
        for name in names:
            if not name.startswith(("test", "__main__")):
                try:
                    importlib.import_module(name)
                except Exception:  # it imports the module, or is no real module
                    continue
        sys.meta_path.remove(blocked)
        for cached in self.module.parent.glob(f"__pycache__/{self.module.stem}.*"):
            cached.unlink()


def report(module: str, survivors: list[Mutant], num_mutants: int, seconds: float) -> int:
    """Print a module's figures; return 1 if `equivalent.toml` does not explain a survivor."""
    known = {(each["was"], each["becomes"]) for each in EXPLAINED.get(module, [])}
    unexplained = [each for each in survivors if (each.was, each.becomes) not in known]
    for each in unexplained:
        print(f"{module}:{each.line}\n- {each.was}\n+ {each.becomes}")
    for was, becomes in known - {(each.was, each.becomes) for each in survivors}:
        print(f"{module}: equivalent.toml names what does not survive\n- {was}\n+ {becomes}")
    print(
        f"{module}: {num_mutants} mutants, {num_mutants - len(survivors)} killed, "
        f"{len(survivors) - len(unexplained)} equivalent, {len(unexplained)} unexplained, "
        f"{seconds:.0f} s",
        flush=True,
    )
    return min(1, len(unexplained))


def mutate(module: str, tests: list[str], every: int) -> bool:
    """Run pytest with the plugin in a fork; return whether no survivor is unexplained."""
    pid = os.fork()
    if pid == 0:
        os._exit(pytest.main([*PYTEST.split(), *tests], [Mutations(Path(module), every)]))
    return os.waitpid(pid, 0)[1] == 0


def main() -> int:
    """Mutate the modules that are named, or all; return 1 if a survivor is unexplained."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="default: all of modules.toml")
    parser.add_argument("--tests", nargs="+", metavar="FILE", help="instead of modules.toml's")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each N-th mutant only")
    arguments = parser.parse_args()
    if "MUTATED_COPY" not in os.environ:
        with copied_tree() as folder:
            variables = os.environ | {"MUTATED_COPY": "1", "PYTHONPATH": str(folder)}
            command = [sys.executable, "-m", "tests.mutation", *sys.argv[1:]]
            return subprocess.run(command, cwd=folder, env=variables, check=False).returncode
    # tests/conftest.py does this too, and starts servers that no mutant needs.
    install_import_hook(["pipeline", "training"], "beartype.beartype")
    torch.set_num_threads(1)
    phases = set(hypothesis.Phase) - {hypothesis.Phase.shrink, hypothesis.Phase.explain}
    hypothesis.settings.register_profile("mutation", phases=phases, database=None, deadline=None)
    modules = arguments.modules or list(TESTS)
    results = [mutate(each, arguments.tests or TESTS[each], arguments.every) for each in modules]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
