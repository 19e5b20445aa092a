"""Start megahour: the console script, apart from the packages, whose names are generic."""

import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    """Start the command line, or say which folder of another project is in the way."""
    spec = find_spec("jobs")
    places = list(spec.submodule_search_locations or []) if spec else []
    if str(Path(__file__).resolve().parent / "jobs") not in places:
        print(
            f"megahour: {places[0] if places else 'a file'} hides megahour's package jobs: start "
            "the command in another folder, take that one out of PYTHONPATH, or rename it",
            file=sys.stderr,
        )
        sys.exit(2)
    from jobs.cli.megahour import main as start  # noqa: PLC0415 - after it is known to be ours

    start()


if __name__ == "__main__":
    main()
