"""Check requests against botocore's models, by their patterns and lists of values, too."""

import re
from collections.abc import Iterator
from typing import Any

from botocore.model import ListShape, MapShape, Shape, StringShape, StructureShape
from botocore.validate import validate_parameters


def require_valid(request: dict[str, Any], shape: Shape) -> None:
    """Require known members of the right types, and strings that the service accepts."""
    validate_parameters(request, shape)
    assert list(_faults(request, shape, "")) == []


def _faults(value: Any, shape: Shape, place: str) -> Iterator[str]:
    if isinstance(shape, StructureShape):
        for name, each in value.items():
            yield from _faults(each, shape.members[name], f"{place}.{name}")
    elif isinstance(shape, ListShape):
        for index, each in enumerate(value):
            yield from _faults(each, shape.member, f"{place}[{index}]")
    elif isinstance(shape, MapShape):
        for name, each in value.items():
            yield from _faults(each, shape.value, f"{place}.{name}")
    elif isinstance(shape, StringShape):
        # Java's escapes of surrogates are no pattern of Python's.
        form = shape.metadata.get("pattern", "")
        if form and "\\uD800" not in form and not re.fullmatch(form, value):
            yield f"{place} = {value!r}: {form}"
        if shape.enum and value not in shape.enum:
            yield f"{place} = {value!r}: none of {shape.enum}"
        if len(value) > shape.metadata.get("max", len(value)):
            yield f"{place}: {len(value)} characters"
