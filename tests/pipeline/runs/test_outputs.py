"""A long list of outputs is read part by part, and few parts for one place."""

import pytest

from pipeline.runs.manifest import Output, OutputPart, OutputsInParts, first_own

NUM_PARTS, PART_OUTPUTS = 64, 3


class Parts:
    """Parts keeps the lines of a list in parts, and the keys of the parts that were read."""

    def __init__(self, outputs: list[Output]) -> None:
        self.data = {
            f"part-{first}": b"".join(each.to_line() for each in outputs[first:][:PART_OUTPUTS])
            for first in range(0, len(outputs), PART_OUTPUTS)
        }
        self.read: list[str] = []

    def listed(self) -> OutputsInParts:
        """Return the list."""
        parts = [OutputPart(key, len(each), "", PART_OUTPUTS) for key, each in self.data.items()]
        return OutputsInParts(parts, self._read)

    def _read(self, part: OutputPart) -> bytes:
        self.read.append(part.key)
        return self.data[part.key]


@pytest.mark.parametrize("num_before", [0, 1, 2, 3, 100, 189, 191, 192])
def test_the_first_own_output_is_found_in_few_parts(num_before: int) -> None:
    """A part for each halving of the list, wherever the base's outputs end."""
    num = NUM_PARTS * PART_OUTPUTS
    outputs = [
        Output(f"{place:03d}", 1, "", 0, 0, run="runs/base" if place < num_before else "")
        for place in range(num)
    ]
    parts = Parts(outputs)
    assert first_own(parts.listed()) == first_own(tuple(outputs)) == num_before
    assert len(parts.read) <= num.bit_length()
