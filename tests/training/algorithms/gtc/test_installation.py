"""What installing this package must have done."""

import shutil

from training.algorithms.gtc import compiled_encoding


def test_loops_are_compiled_where_there_is_a_compiler() -> None:
    """An error in the C file would otherwise pass as a machine without a compiler."""
    assert compiled_encoding.is_compiled() or shutil.which("cc") is None
