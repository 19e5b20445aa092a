"""The state of streams between two calls of an exported model, and the runtime that advances it."""

from dataclasses import dataclass, field, fields

import numpy as np
import onnxruntime
from jaxtyping import Float32, Float64, Int64

from pipeline.filterbank import NUM_BINS
from pipeline.splicing import NUM_INPUTS, STACK

ENERGIES, NUM_REPEATS, LOGITS = "energies", "num_repeats", "logits"
COUNT, SUM, LAST_ROW, HIDDEN, CELL = "count", "sum", "last_row", "hidden", "cell"
"""Names of the graph's inputs; its outputs of state begin with `next_`."""


def next_name(name: str) -> str:
    """Return the name of the output that is the next call's input `name`."""
    return f"next_{name}"


@dataclass(frozen=True, slots=True, eq=False)
class StreamState:
    """StreamState of some streams that advance together: causal mean, last row, LSTM.

    `count` frames have the energies' `sum`; `last_row` is the last spliced row, before
    normalization.
    """

    count: Int64[np.ndarray, " streams"]
    sum: Float64[np.ndarray, "streams 64"]
    last_row: Float32[np.ndarray, "streams 192"]
    hidden: Float32[np.ndarray, "layers streams units"]
    cell: Float32[np.ndarray, "layers streams units"]

    @classmethod
    def start(cls, num_streams: int, num_layers: int, num_units: int) -> "StreamState":
        """Return the state before any frame."""
        recurrent = np.zeros((num_layers, num_streams, num_units), np.float32)
        return cls(
            np.zeros(num_streams, np.int64),
            np.zeros((num_streams, NUM_BINS)),
            np.zeros((num_streams, NUM_INPUTS), np.float32),
            recurrent,
            recurrent,
        )

    def next_utterance(self, unheard: Float32[np.ndarray, "frames 64"]) -> "StreamState":
        """Return the state before the next utterance of one stream, whose causal mean remains.

        The mean holds the last frames too that made no row, as extraction's does.
        """
        total = self.sum.copy()
        for frame in unheard:  # one by one, as all sums of energies
            total += frame
        blank = [np.zeros_like(each) for each in (self.last_row, self.hidden, self.cell)]
        return StreamState(self.count + len(unheard), total, *blank)


@dataclass(frozen=True, slots=True, eq=False)
class Advanced:
    """Advanced: the logits of some frames, `delay` rows late, and the state after them."""

    logits: Float32[np.ndarray, "streams rows senones"]
    state: StreamState


@dataclass(frozen=True, slots=True)
class StreamingModel:
    """StreamingModel runs an exported graph by onnxruntime, on one core."""

    graph: bytes
    session: onnxruntime.InferenceSession = field(init=False)

    def __post_init__(self) -> None:
        options = onnxruntime.SessionOptions()
        # A stream is far below a core; more threads would only wait for each other.
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = onnxruntime.InferenceSession(
            self.graph, options, providers=["CPUExecutionProvider"]
        )
        object.__setattr__(self, "session", session)

    @property
    def num_senones(self) -> int:
        """Return the number of columns of the logits."""
        return int(self.session.get_outputs()[0].shape[-1])

    def start(self, num_streams: int = 1) -> StreamState:
        """Return the state of so many streams before any frame."""
        (hidden,) = (each for each in self.session.get_inputs() if each.name == HIDDEN)
        num_layers, _, num_units = hidden.shape
        return StreamState.start(num_streams, num_layers, num_units)

    def advance(
        self,
        energies: Float32[np.ndarray, "streams frames 64"],
        state: StreamState,
        num_repeats: int = 0,
    ) -> Advanced:
        """Hear frames of all streams, a multiple of 3, and the last row `num_repeats` more times.

        ValueError if that is no row.
        """
        num_frames = energies.shape[1]
        if num_frames % STACK or num_frames + num_repeats == 0:
            raise ValueError(
                f"{num_frames} frames and {num_repeats} repeated rows: need a multiple of {STACK} "
                "frames, and at least one row"
            )
        inputs = {each.name: getattr(state, each.name) for each in fields(state)}
        inputs |= {ENERGIES: energies, NUM_REPEATS: np.asarray(num_repeats, np.int64)}
        names = [LOGITS, *(next_name(each.name) for each in fields(state))]
        logits, count, *others = self.session.run(names, inputs)
        # onnxruntime's integers are C's long long, which NumPy takes for another type than int64.
        return Advanced(logits, StreamState(count.view(np.int64), *others))
