"""Check the arguments and results of every call to a package, at the least cost a call.

jaxtyping's wrapper takes 10 us a call and 2.4 ms a function, beartype's alone 0.5 us and 0.9 ms.
Only where an annotation has an array does a call need jaxtyping: it binds the sizes of one call.
"""

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import jaxtyping
from beartype import beartype
from jaxtyping import AbstractArray, install_import_hook, jaxtyped


def install_checks(*packages: str) -> None:
    """Check all modules of `packages` that are imported from now on."""
    jaxtyping.jaxtyped = _checked  # type: ignore[assignment] - the hook's decorator
    install_import_hook(list(packages), "beartype.beartype")


def _checked(decorated: Any = None, *, typechecker: Callable[..., Any]) -> Any:
    if decorated is None:
        return partial(_checked, typechecker=typechecker)
    if inspect.isfunction(decorated) and not _needs_jaxtyping(decorated):
        return beartype(decorated)
    if dataclasses.is_dataclass(decorated) and not _needs_jaxtyping(decorated.__init__):
        decorated.__init__ = beartype(decorated.__init__)  # type: ignore[misc]
        return decorated
    return jaxtyped(decorated, typechecker=typechecker)


def _needs_jaxtyping(function: Callable[..., Any]) -> bool:
    """Whether an annotation has an array; a name in quotes may be one."""
    return any(_has_array(hint) for hint in function.__annotations__.values())


def _has_array(hint: Any) -> bool:
    if isinstance(hint, str) or (inspect.isclass(hint) and issubclass(hint, AbstractArray)):
        return True
    parts = hint if isinstance(hint, list) else get_args(hint)
    return any(_has_array(part) for part in parts)
