"""Change one thing of a module at a time, and look whether a test fails: `python -m tests.mutation`.

Mutants are written into a temporary copy of the working tree. Each is tested by pytest in a process
forked from one that has already imported torch, pytest and Hypothesis. `modules.toml` names the
tests of each module, `equivalent.toml` the mutants that no test can tell from the module.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = os.environ["TRITON_INTERPRET"] = "1"

import hypothesis
import pytest
import torch

from tests.mutation.mutants import Mutant, c_mutants, python_mutants

FOLDER = Path(__file__).parent
TESTS: dict[str, list[str]] = tomllib.loads((FOLDER / "modules.toml").read_text())
EQUIVALENT: dict[str, list[dict[str, str]]] = tomllib.loads((FOLDER / "equivalent.toml").read_text())
PYTEST = "-x -q -p no:cacheprovider --noconftest --hypothesis-seed=0 --hypothesis-profile=mutation"
COMPILER = "cc -O3 -ffp-contract=off -fno-trapping-math -shared -fPIC"


@contextmanager
def copied_tree() -> Iterator[Path]:
    """Copy the working tree, with what is compiled but not what is ignored otherwise."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")
    names += map(str, Path("training").rglob("*.so"))
    with tempfile.TemporaryDirectory() as folder:
        for name in filter(os.path.isfile, names):
            copied = Path(folder, name)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(name, copied)
        yield Path(folder)


def run_tests(tests: list[str], limit_s: float) -> bool:
    """Run pytest in a fork; return whether all tests passed within `limit_s`."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        with Path("pytest.log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os._exit(pytest.main([*PYTEST.split(), *tests]))
    deadline = time.monotonic() + limit_s
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status == 0
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return False
        time.sleep(0.01)


def survivors_of(module: str, tests: list[str]) -> tuple[list[Mutant], int]:
    """Test all mutants of a module; return those that passed, and the number of all."""
    path = Path(module)
    source = path.read_text()
    started = time.monotonic()
    if not run_tests(tests, 600):
        sys.exit(f"{module}: its tests fail without a mutation:\n{Path('pytest.log').read_text()}")
    limit_s = 10 + 5 * (time.monotonic() - started)
    shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)
    survivors, num_mutants = [], 0
    for mutant in c_mutants(source) if path.suffix == ".c" else python_mutants(source):
        path.write_text(mutant.source)
        if path.suffix == ".c" and not compiles(path):
            continue
        num_mutants += 1
        if run_tests(tests, limit_s):
            survivors.append(mutant)
            print(f"{module}:{mutant.line}\n- {mutant.was}\n+ {mutant.becomes}", flush=True)
    path.write_text(source)
    return survivors, num_mutants


def compiles(path: Path) -> bool:
    """Compile a mutated C file to where its module looks for it."""
    library = path.with_name(f"_{path.stem}{sysconfig.get_config_var('EXT_SUFFIX')}")
    library.unlink(missing_ok=True)
    command = [*COMPILER.split(), str(path), "-o", str(library)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def report(module: str, tests: list[str]) -> int:
    """Print a module's figures; return how many survivors `equivalent.toml` does not explain."""
    started = time.monotonic()
    survivors, num_mutants = survivors_of(module, tests)
    known = {(each["was"], each["becomes"]) for each in EQUIVALENT.get(module, [])}
    found = {(each.was, each.becomes) for each in survivors}
    for was, becomes in known - found:
        print(f"{module}: equivalent.toml names what does not survive\n- {was}\n+ {becomes}")
    unexplained = [each for each in survivors if (each.was, each.becomes) not in known]
    for each in unexplained:
        print(f"UNEXPLAINED {module}:{each.line}\n- {each.was}\n+ {each.becomes}")
    print(
        f"{module}: {num_mutants} mutants, {num_mutants - len(survivors)} killed, "
        f"{len(survivors) - len(unexplained)} equivalent, {len(unexplained)} unexplained, "
        f"{time.monotonic() - started:.0f} s",
        flush=True,
    )
    return len(unexplained)


def main() -> int:
    """Mutate the modules that are named, or all; exit with 1 if a survivor is unexplained."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="default: all of modules.toml")
    parser.add_argument("--tests", nargs="+", metavar="FILE", help="instead of modules.toml's")
    arguments = parser.parse_args()
    if Path.cwd() != FOLDER.parents[1] or "MUTATED_COPY" not in os.environ:
        with copied_tree() as folder:
            variables = os.environ | {"MUTATED_COPY": "1", "PYTHONPATH": str(folder)}
            command = [sys.executable, "-B", "-m", "tests.mutation", *sys.argv[1:]]
            return subprocess.run(command, cwd=folder, env=variables, check=False).returncode
    torch.set_num_threads(1)
    phases = set(hypothesis.Phase) - {hypothesis.Phase.shrink, hypothesis.Phase.explain}
    hypothesis.settings.register_profile("mutation", phases=phases, database=None)
    modules = arguments.modules or list(TESTS)
    return min(1, sum(report(each, arguments.tests or TESTS[each]) for each in modules))


if __name__ == "__main__":
    sys.exit(main())
