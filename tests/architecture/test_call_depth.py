"""Few files lie between a job and its equations."""

from pathlib import Path

from tests.architecture.call_depth import MAX_FILES, trace_steps


def test_at_most_eight_files_from_a_job_to_its_equations(tmp_path: Path) -> None:
    """Counted on the call stacks of small runs, from the job's file to the equation's."""
    for step, trace in trace_steps(tmp_path).items():
        assert trace.chains.keys() == set(trace.equations)
        for chain in trace.chains.values():
            assert chain[0] == f"jobs/{step}.py"
            assert len(chain) <= MAX_FILES, " > ".join(chain)
        assert trace.executed > set(chain)
