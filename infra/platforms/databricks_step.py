"""Run a step as a task of Databricks: databricks_step.py STEP ARGUMENTS.

Databricks takes each SystemExit for a failure, also that of exit code 0.
"""

import runpy
import sys


def main() -> None:
    """Run the step; raise RuntimeError where it ends with another exit code than 0."""
    step = sys.argv[1]
    sys.argv = sys.argv[1:]
    try:
        runpy.run_module(f"jobs.{step}", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code:
            raise RuntimeError(f"{step}: exit code {ended.code}") from ended


if __name__ == "__main__":
    main()
