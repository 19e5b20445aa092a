"""Export models with explicit state, and recognize speech with them as it arrives."""

from importlib.util import find_spec

_NEEDED = "exported models need it: pip install megahour[deploy]"

if find_spec("onnxruntime") is None:
    raise ImportError(f"onnxruntime: {_NEEDED}")
