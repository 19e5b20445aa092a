"""Look up known vulnerabilities of every pinned dependency: `make audit`.

Ends with 1 if one is known. A package that no advisory service answered for is reported, and ends
with 0: an environment may reach a package index alone. pip-audit itself says "No known
vulnerabilities found" where an index knows no advisories at all, so its exit code is not used.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
PINS = ("constraints.txt", "infra/airflow/constraints.txt")
PYPI = ("--vulnerability-service", "pypi")
OSV = ("--vulnerability-service", "osv")
LIMIT_S = 120.0
"""A service that drops what it is sent would otherwise take 15 s for each of 200 packages."""


@dataclass(frozen=True)
class Audit:
    """Audit holds the vulnerabilities that are known, and the packages that were not looked up."""

    vulnerable: tuple[str, ...]
    unknown: tuple[str, ...]
    num_packages: int


def read_report(report: dict[str, Any]) -> Audit:
    """Read pip-audit's JSON."""
    packages = report["dependencies"]
    vulnerable = [
        f"{each['name']} {each['version']}: {found['id']}, fixed in "
        f"{', '.join(found['fix_versions']) or 'no version'}"
        for each in packages
        for found in each.get("vulns", ())
    ]
    unknown = [each["name"] for each in packages if "skip_reason" in each]
    return Audit(tuple(vulnerable), tuple(unknown), len(packages))


def audit(requirements: Path, service: Sequence[str]) -> Audit | str:
    """Ask one service about pinned requirements; return the last line of its error if it fails."""
    program = Path(sys.executable).with_name("pip-audit")
    options = ["--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off"]
    command = [program, "--requirement", requirements, *options, "--timeout", "15", *service]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"nothing within {LIMIT_S:.0f} s"
    try:
        return read_report(json.loads(done.stdout))
    except (ValueError, KeyError):
        return (done.stderr.strip().splitlines() or ["no answer"])[-1]


def report(requirements: Path, services: Sequence[Sequence[str]]) -> int:
    """Print what the first service that knows every package says, or all; return 1 or 0."""
    vulnerable: set[str] = set()
    for service in services:
        found = audit(requirements, service)
        where = f"{requirements} at {service[1]}"
        if isinstance(found, str):
            print(f"NOT AUDITED: {where} did not answer: {found}")
            continue
        vulnerable |= set(found.vulnerable)
        if not found.unknown:
            print(f"{where}: {found.num_packages} packages looked up")
            break
        some = ", ".join(found.unknown[:5])
        print(f"NOT AUDITED: {where} knows nothing of {len(found.unknown)} packages: {some}")
    for each in sorted(vulnerable):
        print(f"VULNERABLE: {each}")
    return bool(vulnerable)


def main() -> None:
    """Audit all pins."""
    codes = [report(REPOSITORY / pins, (PYPI, OSV)) for pins in PINS]
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
