"""`python -m tests.mutation` changes one thing of a module at a time and looks if a test fails.

Mutants are written into a temporary copy of the working tree, and tested in forks of one process
that has imported what is slow to import. `modules.toml` names the tests of each module,
`equivalent.toml` the mutants that no test can tell from the module, with reasons.
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
from dataclasses import dataclass
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = os.environ["TRITON_INTERPRET"] = "1"

import hypothesis
import pytest

from tests.array_checks import install_checks
from tests.mutation.mutants import c_mutants, python_mutants

FOLDER = Path(__file__).parent
PYTEST = (
    "-x -q -s --noconftest --hypothesis-seed=0 -p no:cacheprovider -p no:faulthandler "
    "-p no:unraisableexception"  # its collections of garbage take 1 s a run
)
SLOW_IMPORTS = ("torch._dynamo", "triton", "scipy.signal", "infra.store.object_store")
COMPILER = "cc -O3 -ffp-contract=off -fno-trapping-math -shared -fPIC"
MAX_BYTES = 12 * 2**30


@dataclass
class FastestFirst:
    """A pytest plugin that runs the fastest tests first, once it has seen all of them."""

    path: Path

    def __post_init__(self) -> None:
        self.seconds = Counter(json.loads(self.path.read_text()) if self.path.exists() else {})

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self.seconds[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        if not self.path.exists():
            self.path.write_text(json.dumps(self.seconds))


def run_tests(tests: list[str], limit_s: int, seconds: Path) -> tuple[bool, float]:
    """Run pytest in a fork; return whether all tests passed, and the processor time."""
    pid = os.fork()
    if pid:
        _, status, usage = os.wait4(pid, 0)
        return status == 0, usage.ru_utime + usage.ru_stime
    # Only the first run may keep bytecode: a mutant's would be taken for the next one's.
    sys.dont_write_bytecode = seconds.exists()
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, resource.RLIM_INFINITY))
    log = os.open("pytest.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os._exit(pytest.main([*PYTEST.split(), *tests], [FastestFirst(seconds)]))


def is_loadable(path: Path) -> bool:
    """Compile a C file to where its module looks for it; a Python file is as it is."""
    if path.suffix == ".py":
        return True
    library = path.with_name(f"_{path.stem}{sysconfig.get_config_var('EXT_SUFFIX')}")
    library.unlink(missing_ok=True)
    command = [*COMPILER.split(), str(path), "-o", str(library)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def count_unexplained(
    module: str, tests: list[str], known: list[dict[str, str]], every: int
) -> int:
    """Test each mutant of a module; print and count the survivors that are not `known`."""
    started, path = time.monotonic(), Path(module)
    source, seconds = path.read_text(), Path(f"{path.stem}_seconds.json")
    passed, cpu_s = run_tests(tests, 300, seconds)
    if not passed:
        sys.exit(f"{module}: tests fail without a mutation\n{Path('pytest.log').read_text()}")
    for cached in path.parent.glob(f"__pycache__/{path.stem}.*"):
        cached.unlink()
    survivors, num_mutants = [], 0
    for mutant in (c_mutants if path.suffix == ".c" else python_mutants)(source)[::every]:
        path.write_text(mutant.source)
        if is_loadable(path):
            num_mutants += 1
            if run_tests(tests, 5 + round(5 * cpu_s), seconds)[0]:
                survivors.append(mutant)
    path.write_text(source)
    is_loadable(path)
    explained = {(each["was"], each["becomes"]) for each in known}
    unexplained = [each for each in survivors if (each.was, each.becomes) not in explained]
    for each in unexplained:
        print(f"{module}:{each.line}\n- {each.was}\n+ {each.becomes}")
    killed = explained - {(each.was, each.becomes) for each in survivors} if every == 1 else []
    for was, becomes in killed:
        print(f"{module}: equivalent.toml names what does not survive\n- {was}\n+ {becomes}")
    print(
        f"{module}: {num_mutants} mutants, {num_mutants - len(survivors)} killed, "
        f"{len(survivors) - len(unexplained)} equivalent, {len(unexplained)} unexplained, "
        f"{time.monotonic() - started:.0f} s",
        flush=True,
    )
    return len(unexplained)


def run_in_copy(arguments: list[str]) -> int:
    """Run this command in a temporary copy of all files but those that Git ignores."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")
    names += map(str, Path("training").rglob("*.so"))
    with tempfile.TemporaryDirectory() as folder:
        for name in filter(os.path.isfile, names):
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(name, Path(folder, name))
        variables = os.environ | {"MUTATED_COPY": "1", "PYTHONPATH": folder}
        command = [sys.executable, "-m", "tests.mutation", *arguments]
        return subprocess.run(command, cwd=folder, env=variables, check=False).returncode


def main() -> int:
    """Mutate the modules that are named, or all; return 1 if a survivor is unexplained."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="default: all of modules.toml")
    parser.add_argument("--tests", nargs="+", metavar="FILE", help="instead of modules.toml's")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each N-th mutant only")
    arguments = parser.parse_args()
    if "MUTATED_COPY" not in os.environ:
        return run_in_copy(sys.argv[1:])
    # The hook as in tests/conftest.py, which also starts servers that no mutant needs.
    install_checks("pipeline", "training")
    for name in SLOW_IMPORTS:
        importlib.import_module(name)
    phases = {hypothesis.Phase.explicit, hypothesis.Phase.generate}
    hypothesis.settings.register_profile(
        "mutation", phases=phases, database=None, deadline=None, max_examples=30
    )
    hypothesis.settings.load_profile("mutation")
    sys.modules["torch"].set_num_threads(1)
    gc.freeze()  # a fork's collections skip what is imported
    tests, known = (
        tomllib.loads((FOLDER / name).read_text()) for name in ("modules.toml", "equivalent.toml")
    )
    num_unexplained = 0
    for module in arguments.modules or tests:
        of_module = arguments.tests or tests[module]
        num_unexplained += count_unexplained(
            module, of_module, known.get(module, []), arguments.every
        )
    return min(1, num_unexplained)


if __name__ == "__main__":
    sys.exit(main())
