"""Start each command from its own file, by megahour, spark-submit, torchrun or python -m."""

import os
import sys
from importlib.util import find_spec


def hidden_package() -> str:
    """Name a package of megahour that another folder hides, and say what to do; "" if none."""
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH120, PTH100 - may be in a zip
    for name in ("training", "pipeline", "infra"):
        spec = find_spec(name)
        places = (
            [str(each) for each in spec.submodule_search_locations or [spec.origin or ""]]
            if spec
            else []
        )
        if os.path.join(own, name) not in map(os.path.abspath, places):  # noqa: PTH118
            found = f"{places[0]} hides" if places else "nothing is"
            return (
                f"{found} megahour's package {name} ({own}): start the command in another folder, "
                "take that one out of PYTHONPATH, or rename it"
            )
    return ""


# Before the first import of these packages, whose error would name a module of megahour alone.
if _hidden := hidden_package():
    print(f"megahour: {_hidden}", file=sys.stderr)
    raise SystemExit(2)

# Before NumPy is imported, here and in Spark's local workers.
from infra.blas_threads import use_one_thread  # noqa: E402 - once it is known that infra is ours

use_one_thread()
