"""Read and parse the packages' source, once a process and only where a test asks for it."""

import ast
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("pipeline", "training", "jobs", "infra")


@cache
def trees() -> dict[Path, ast.Module]:
    """Each file's syntax tree by its path below the repository: 0.8 s for all."""
    return {
        path.relative_to(REPOSITORY): ast.parse(path.read_text())
        for package in PACKAGES
        for path in sorted((REPOSITORY / package).rglob("*.py"))
    }
