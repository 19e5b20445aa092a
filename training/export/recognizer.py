"""Recognize one stream of speech: samples in, words out, by an exported model.

onnxruntime advances the state of streams from call to call. Features are extraction's to the bit,
logits the batch's to 1e-4, wherever the stream is cut.
"""

from dataclasses import dataclass, fields

import numpy as np
import onnxruntime
from jaxtyping import Float32, Float64, Int64
from scipy.special import log_softmax

from infra.settings import ConfigurationError, printable
from pipeline.filterbank import (
    FRAME_SHIFT_MS,
    NUM_BINS,
    NUM_INPUTS,
    SHIFT_SAMPLES,
    STACK,
    WINDOW_SAMPLES,
    Engine,
)
from pipeline.filterbank.log_mel import log_mel_energies, mono_samples, num_frames
from training.decode.decoder import BestPath, StreamingSearch
from training.export.archive import ExportedModel

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
    sum: Float64[np.ndarray, "streams bins"]
    last_row: Float32[np.ndarray, "streams dim"]
    hidden: Float32[np.ndarray, "layers streams units"]
    cell: Float32[np.ndarray, "layers streams units"]

    def next_utterance(self, unheard: Float32[np.ndarray, "frames bins"]) -> "StreamState":
        """Return the state before the next utterance of one stream, whose causal mean remains.

        The mean holds the last frames too that made no row, as extraction's does.
        """
        total = self.sum.copy()
        for frame in unheard:  # one by one, as all sums of energies
            total += frame
        blank = [np.zeros_like(each) for each in (self.last_row, self.hidden, self.cell)]
        return StreamState(self.count + len(unheard), total, *blank)


class StreamingModel:
    """StreamingModel runs an exported graph by onnxruntime, on one core.

    ConfigurationError for bytes that are no such graph.
    """

    def __init__(self, graph: bytes) -> None:
        options = onnxruntime.SessionOptions()
        # A stream is far below a core; more threads would only wait for each other.
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        if EXTERNAL_DATA in graph:
            raise ConfigurationError(f"the network names weights in another file: {_EXPORT}")
        try:
            self.session = onnxruntime.InferenceSession(
                graph, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime's own have no class in common
            said = printable(str(error), 200)
            raise ConfigurationError(f"no network of ONNX: {said}: {_EXPORT}") from error
        state = {each.name for each in fields(StreamState)}
        inputs = {each.name for each in self.session.get_inputs()}
        outputs = {each.name: each.shape for each in self.session.get_outputs()}
        has_inputs = inputs == {ENERGIES, NUM_REPEATS, *state}
        if not has_inputs or outputs.keys() != {LOGITS, *map(next_name, state)}:
            raise ConfigurationError(f"a network of other inputs or outputs: {_EXPORT}")
        self.num_senones = int(outputs[LOGITS][-1])

    def start(self, num_streams: int = 1) -> StreamState:
        """Return the state of so many streams before any frame."""
        (hidden,) = (each for each in self.session.get_inputs() if each.name == HIDDEN)
        num_layers, _, num_units = hidden.shape
        recurrent = np.zeros((num_layers, num_streams, num_units), np.float32)
        return StreamState(
            np.zeros(num_streams, np.int64),
            np.zeros((num_streams, NUM_BINS)),
            np.zeros((num_streams, NUM_INPUTS), np.float32),
            recurrent,
            recurrent,
        )

    def advance(
        self,
        energies: Float32[np.ndarray, "streams frames bins"],
        state: StreamState,
        num_repeats: int = 0,
    ) -> tuple[Float32[np.ndarray, "streams rows senones"], StreamState]:
        """Hear frames of all streams, a multiple of 3, and the last row `num_repeats` more times.

        Return the logits, `delay` rows late, and the state after them. ValueError if that is no
        row.
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
        return logits, StreamState(count.view(np.int64), *others)


EXTERNAL_DATA = b"\n\x08location\x12"
"""What names the file of a tensor's weights in a network: it could be any of the machine."""

_EXPORT = "need a model that megahour export wrote"

ROW_S = STACK * FRAME_SHIFT_MS / 1000

MAX_UTTERANCE_ROWS = 20_000
"""An utterance ends after ten minutes, as its lattice is in memory until then."""

_NO_SAMPLES = np.zeros(0, np.float32)
_NO_ENERGIES = np.zeros((0, NUM_BINS), np.float32)


class EnergyStream:
    """EnergyStream computes log-mel energies of samples as they arrive, in whole rows of three.

    A frame's energies depend on its own 400 samples alone, so cuts change no bit. The last one or
    two frames, `incomplete`, wait for their row.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._samples = _NO_SAMPLES
        self.incomplete = _NO_ENERGIES

    def accept(
        self, samples: Float32[np.ndarray, " samples"]
    ) -> Float32[np.ndarray, "frames bins"]:
        """Return the energies of the rows that these 16 kHz samples in [-1, 1] complete.

        ValueError for samples that are not finite, of integers, or of several channels.
        """
        samples = mono_samples(samples)
        if not np.isfinite(samples).all():
            raise ValueError("samples are not finite: check what recorded or decoded them")
        heard = np.concatenate([self._samples, samples])
        count = num_frames(len(heard))
        self._samples = heard[count * SHIFT_SAMPLES :]
        if count:
            own = heard[: (count - 1) * SHIFT_SAMPLES + WINDOW_SAMPLES]
            new = log_mel_energies(own, self._engine)
            self.incomplete = np.concatenate([self.incomplete, new])
        whole = len(self.incomplete) // STACK * STACK
        complete, self.incomplete = self.incomplete[:whole], self.incomplete[whole:]
        return complete


class AcousticStream:
    """AcousticStream: one stream's log-mel energies to logits, aligned with its rows."""

    def __init__(self, model: StreamingModel, delay: int, state: StreamState | None = None) -> None:
        self._model, self._delay = model, delay
        self.state = state or model.start()
        self._num_early = delay
        self._num_rows = 0

    def accept(
        self, energies: Float32[np.ndarray, "frames bins"]
    ) -> Float32[np.ndarray, "rows senones"]:
        """Return the logits of rows that these frames, a multiple of 3, complete."""
        self._num_rows += len(energies) // STACK
        return self._advance(energies, 0)

    def finish(self) -> Float32[np.ndarray, "rows senones"]:
        """Return the logits of the last rows: the look-ahead beyond the end repeats the last."""
        return self._advance(_NO_ENERGIES, self._delay if self._num_rows else 0)

    def _advance(
        self, energies: Float32[np.ndarray, "frames bins"], num_repeats: int
    ) -> Float32[np.ndarray, "rows senones"]:
        if len(energies) + num_repeats == 0:
            return np.zeros((0, self._model.num_senones), np.float32)
        (all_logits,), self.state = self._model.advance(
            energies[np.newaxis], self.state, num_repeats
        )
        # The first outputs speak of no row.
        logits: Float32[np.ndarray, "rows senones"] = all_logits[self._num_early :]
        self._num_early -= len(all_logits) - len(logits)
        return logits


@dataclass(frozen=True, slots=True)
class Transcript:
    """Transcript: the words of an utterance so far, or at its end; times are of the stream.

    Final words are those of the rescored lattice, each with its `confidence`; words so far are the
    first pass's, without one.
    """

    words: tuple[str, ...]
    confidences: tuple[float, ...]
    is_final: bool
    start_s: float
    end_s: float


class Recognizer:
    """Recognizer writes the words of one stream; a pause of `pause_s` ends an utterance, 0 none.

    So do ten minutes. The causal mean and the network's state continue over a pause. `state` is
    that of the same speaker's last utterance, if any.
    """

    def __init__(
        self,
        exported: ExportedModel,
        model: StreamingModel,
        pause_s: float = 0.0,
        state: StreamState | None = None,
    ) -> None:
        self._graph, self._settings = exported.graph, exported.settings
        if (num_priors := len(exported.settings.log_priors)) != model.num_senones:
            found = f"a network of {model.num_senones} senones for {num_priors} priors"
            raise ConfigurationError(f"{found}: {_EXPORT}")
        self._log_priors = np.array(exported.settings.log_priors, np.float32)
        self._silence = np.array(exported.settings.silence)
        self._pause_rows = round(pause_s / ROW_S)
        self._energies = EnergyStream(exported.settings.engine)
        self._acoustic = AcousticStream(model, exported.settings.delay, state)
        self._search = self._new_search()
        self._second_pass = exported.second_pass
        self._first_row = self._next_row = 0

    @property
    def state(self) -> StreamState:
        """Return the state with which the same speaker's next utterance begins."""
        return self._acoustic.state.next_utterance(self._energies.incomplete)

    def accept(self, samples: Float32[np.ndarray, " samples"]) -> Transcript:
        """Hear 16 kHz samples in [-1, 1]; return the words so far, final after a pause."""
        self._advance(self._acoustic.accept(self._energies.accept(samples)))
        path = self._search.best(ends_sentence=False)
        if not self._is_pause(path) and self._next_row - self._first_row < MAX_UTTERANCE_ROWS:
            return self._transcript(path.words if path else (), (), is_final=False)
        ended = self._ended()
        self._search = self._new_search()
        self._first_row = self._next_row
        return ended

    def finish(self) -> Transcript:
        """Return the final words at the end of the stream."""
        self._advance(self._acoustic.finish())
        return self._ended()

    def _new_search(self) -> StreamingSearch:
        return StreamingSearch(self._graph, self._settings.decoder)

    def _ended(self) -> Transcript:
        lattice = self._search.lattice()
        if lattice is None:
            return self._transcript((), (), is_final=True)
        found = self._second_pass.hypothesis(lattice)
        confidences = tuple(found.confidences.tolist())
        return self._transcript(found.path.words, confidences, is_final=True)

    def _advance(self, logits: Float32[np.ndarray, "rows senones"]) -> None:
        scores = log_softmax(logits, axis=1) - self._log_priors
        self._search.advance(np.float32(self._settings.acoustic_scale) * scores)
        self._next_row += len(logits)

    def _is_pause(self, path: BestPath | None) -> bool:
        if path is None or not self._pause_rows:
            return False
        last = path.senones[-self._pause_rows :]
        return len(last) == self._pause_rows and bool(np.isin(last, self._silence).all())

    def _transcript(
        self, words: tuple[str, ...], confidences: tuple[float, ...], *, is_final: bool
    ) -> Transcript:
        times_s = ROW_S * self._first_row, ROW_S * self._next_row
        return Transcript(words, confidences, is_final, *times_s)
