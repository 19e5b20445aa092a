"""Check what the installation of this package has compiled."""

import shutil

from training.algorithms.gtc import compiled_encoding


def test_loops_are_compiled_where_there_is_a_compiler() -> None:
    """The loops are compiled if there is a compiler: an error in the C file fails here."""
    assert compiled_encoding.is_compiled() or shutil.which("cc") is None
