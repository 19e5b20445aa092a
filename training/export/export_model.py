"""Export a run's LSTM as an ONNX graph, and count the word errors of what was exported.

The graph leads from log-mel energies to logits, with the state as tensors. Causal mean, splicing,
global mean and variance are inside, as the paper has them (003 II-B, IV-B2). The operators are
ONNX's own, so any runtime can run the graph. The decoding graph and the settings are those that the
run's evaluation decodes with.
"""

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from jaxtyping import Float32
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import quantize_dynamic
from torch import Tensor, nn

from infra.store.object_store import Fetched, ObjectStore, StoreError
from pipeline.audio.decode import decode_utterance
from pipeline.audio.errors import AudioError
from pipeline.filterbank import NUM_BINS, NUM_INPUTS, SAMPLE_RATE_HZ, STACK
from pipeline.filterbank.log_mel import num_frames
from pipeline.records import Utterance, parse_utterance
from pipeline.runs.manifest import read_manifest, read_output, subsets_of_run
from pipeline.runs.names import DEV, HELDOUT, selection_step
from pipeline.settings import ExtractionConfig, MeanNormalization
from pipeline.steps.features import MIN_FRAMES, audio_objects
from training.align.labelled import read_tree
from training.decode.lexicon import SILENCE_ID
from training.evaluate.stored_graphs import BuiltGraphs
from training.evaluate.tuning import recipe_settings, tuned_settings
from training.evaluate.word_errors import WordErrors, word_errors
from training.export.archive import ExportedModel, ExportedSettings, ExportPrecision
from training.export.recognizer import (
    CELL,
    COUNT,
    ENERGIES,
    HIDDEN,
    LAST_ROW,
    LOGITS,
    NUM_REPEATS,
    SUM,
    Recognizer,
    StreamingModel,
    StreamState,
    next_name,
)
from training.models.lstm import FrequencyFilters, LstmModel
from training.models.store import load_model
from training.settings.models import (
    FIRST_BINS,
    FIRST_STRIDE,
    SECOND_PLACES,
    LstmConfig,
    ModelConfig,
)
from training.settings.recipe import Recipe

OPSET, IR_VERSION = 18, 9
"""Of 2022 and 2023, so that older runtimes on devices read the graph too."""

_FLOAT, _DOUBLE, _INT64 = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64


def streaming_graph(model: LstmModel, mean: MeanNormalization = "causal") -> onnx.ModelProto:
    """Write the graph of a model that runs forward in time.

    Inputs are `energies` (streams, frames, 64), of which the frames are a multiple of 3, and the
    state of `stream_state`. `num_repeats` times the last spliced row is heard again: the look-ahead
    at the end of an utterance. Outputs are `logits` (streams, rows, senones) and the next state.
    """
    graph = _Graph()
    features = _causal_features(graph) if mean == "causal" else _energies_as_stored(graph)
    logits = _logits(graph, model, _normalized_rows(graph, model, features))
    graph.add("Identity", [logits], LOGITS)
    return graph.proto(model)


def in_int8(network: onnx.ModelProto) -> bytes:
    """Round weights to 7 bits of 8, a scale a matrix; inputs are rounded as they come, to 8 bits.

    Sums of two products of 8 bits are cut off in CPUs without VNNI: on AVX2 logits were wrong by
    12 % of their deviation, and with 7 bits by .8 %. The operators are onnxruntime's, so no other
    runtime runs the graph.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "int8.onnx"
        # The graph has no shapes to infer and nothing to fuse: it asks for that in a warning.
        helper.set_model_props(network, {"onnx.quant.pre_process": "onnxruntime.quant"})
        quantize_dynamic(network, path, op_types_to_quantize=["LSTM", "MatMul"], reduce_range=True)
        return path.read_bytes()


def require_exportable(form: ModelConfig) -> None:
    """Raise ValueError, with a remedy, unless models of this form run forward in time as LSTMs."""
    if form.bidirectional:
        raise ValueError(
            "it is bidirectional: its outputs need the whole utterance, so it cannot hear speech "
            "as it arrives: export the student, which learned from it"
        )
    if not isinstance(form, LstmConfig):
        raise ValueError(
            f'models.student.name = "{form.name}": need an LSTM, whose state is two tensors a '
            "layer: export other networks by torch.onnx, from your own code"
        )


class _Graph:
    """_Graph collects nodes and constants; each node has one output unless named otherwise."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[TensorProto] = []

    def add(self, kind: str, inputs: Sequence[str], output: str = "", **attributes: Any) -> str:  # noqa: ANN401 - of any node
        """Add a node of one output; return the output's name."""
        name = output or f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name=name, **attributes))
        return name

    def constant(self, value: Any, dtype: type[np.generic]) -> str:  # noqa: ANN401 - array or number
        """Add a constant; return its name."""
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def integers(self, *values: int) -> str:
        """Add a vector of integers, such as axes."""
        return self.constant(values, np.int64)

    def slice(self, tensor: str, first: str, last: str, axis: int) -> str:
        """Add a slice along an axis."""
        return self.add("Slice", [tensor, first, last, self.integers(axis)])

    def proto(self, model: LstmModel) -> onnx.ModelProto:
        """Return the checked model."""
        layers, units = model.lstm.num_layers, model.lstm.hidden_size
        state: list[tuple[str, int, list[str | int | None]]] = [
            (COUNT, _INT64, ["streams"]),
            (SUM, _DOUBLE, ["streams", NUM_BINS]),
            (LAST_ROW, _FLOAT, ["streams", NUM_INPUTS]),
            (HIDDEN, _FLOAT, [layers, "streams", units]),
            (CELL, _FLOAT, [layers, "streams", units]),
        ]
        make, streams = helper.make_tensor_value_info, "streams"
        energies = make(ENERGIES, _FLOAT, [streams, "frames", NUM_BINS])
        repeats = make(NUM_REPEATS, _INT64, [])
        before = [make(name, kind, shape) for name, kind, shape in state]
        after = [make(next_name(name), kind, shape) for name, kind, shape in state]
        logits = make(LOGITS, _FLOAT, [streams, "rows", model.num_senones])
        outputs = [logits, *after]
        graph = helper.make_graph(
            self.nodes, "megahour", [energies, repeats, *before], outputs, self.constants
        )
        opsets = [helper.make_opsetid("", OPSET)]
        made = helper.make_model(graph, opset_imports=opsets, producer_name="megahour")
        made.ir_version = IR_VERSION
        onnx.checker.check_model(made)
        return made


def _causal_features(graph: _Graph) -> str:
    """Subtract the causal mean, in the order of additions of `CausalMean`, to the bit."""
    add, axis = graph.add, graph.constant(1, np.int64)
    # The sum before is the first term: float64, as a float32 mean is off by 0.05 after 28 h.
    wide = add("Cast", [ENERGIES], to=_DOUBLE)
    terms = add("Concat", [add("Unsqueeze", [SUM, graph.integers(1)]), wide], axis=1)
    sums = add("CumSum", [terms, axis])
    end = graph.integers(np.iinfo(np.int64).max)
    own = graph.slice(sums, graph.integers(1), end, 1)
    last = graph.slice(sums, graph.integers(-1), end, 1)
    add("Squeeze", [last, graph.integers(1)], next_name(SUM))
    num_frames = add("Gather", [add("Shape", [ENERGIES]), axis])
    one = graph.constant(1, np.int64)
    numbers = add("Range", [one, add("Add", [num_frames, one]), one])
    counts = add("Add", [add("Unsqueeze", [COUNT, graph.integers(1)]), numbers])
    add("Add", [COUNT, num_frames], next_name(COUNT))
    shares = add("Div", [graph.constant(1, np.float64), add("Cast", [counts], to=_DOUBLE)])
    means = add("Mul", [own, add("Unsqueeze", [shares, graph.integers(2)])])
    return _as_stored(graph, add("Cast", [add("Sub", [wide, means])], to=_FLOAT))


def _energies_as_stored(graph: _Graph) -> str:
    """Subtract nothing: the state has count and sum all the same, so that callers need no case."""
    for name in (COUNT, SUM):
        graph.add("Identity", [name], next_name(name))
    return _as_stored(graph, ENERGIES)


def _as_stored(graph: _Graph, features: str) -> str:
    """Round to float16, as features are stored and as the model heard them in training."""
    return graph.add("Cast", [graph.add("Cast", [features], to=TensorProto.FLOAT16)], to=_FLOAT)


def _normalized_rows(graph: _Graph, model: LstmModel, features: str) -> str:
    """Splice three frames a row, repeat the last row if asked to, apply mean and variance."""
    add = graph.add
    shape = add("Shape", [features])
    num_streams = graph.slice(shape, graph.integers(0), graph.integers(1), 0)
    num_frames = graph.slice(shape, graph.integers(1), graph.integers(2), 0)
    num_rows = add("Div", [num_frames, graph.integers(STACK)])
    width = graph.integers(NUM_INPUTS)
    spliced = add("Concat", [num_streams, num_rows, width], axis=0)
    rows = add("Reshape", [features, spliced], allowzero=1)
    before = add("Unsqueeze", [LAST_ROW, graph.integers(1)])
    known = add("Concat", [before, rows], axis=1)
    end = graph.integers(np.iinfo(np.int64).max)
    last = graph.slice(known, graph.integers(-1), end, 1)
    add("Squeeze", [last, graph.integers(1)], next_name(LAST_ROW))
    repeats = add("Unsqueeze", [NUM_REPEATS, graph.integers(0)])
    repeated = add("Expand", [last, add("Concat", [num_streams, repeats, width], axis=0)])
    heard = add("Concat", [rows, repeated], axis=1)
    centred = add("Sub", [heard, graph.constant(_array(model.mean), np.float32)])
    return add("Mul", [centred, graph.constant(_array(model.inverse_deviation), np.float32)])


def _logits(graph: _Graph, model: LstmModel, rows: str) -> str:
    """Add a node for each layer, with its own part of the state, and the output layer."""
    num_layers = model.lstm.num_layers
    split = [[f"{name}_{layer}" for layer in range(num_layers)] for name in (HIDDEN, CELL)]
    for name, parts in zip((HIDDEN, CELL), split, strict=True):
        node = helper.make_node("Split", [name], parts, axis=0, num_outputs=num_layers)
        graph.nodes.append(node)
    if isinstance(model.filters, FrequencyFilters):
        rows = _filtered(graph, model.filters, rows)
    outputs = graph.add("Transpose", [rows], perm=[1, 0, 2])
    for layer, (hidden, cell) in enumerate(zip(*split, strict=True)):
        outputs = _layer(graph, model, layer, outputs, [hidden, cell])
    for name in (HIDDEN, CELL):
        parts = [next_name(f"{name}_{layer}") for layer in range(num_layers)]
        graph.add("Concat", parts, next_name(name), axis=0)
    return graph.add("Transpose", [_linear(graph, model.output, outputs)], perm=[1, 0, 2])


def _filtered(graph: _Graph, filters: FrequencyFilters, rows: str) -> str:
    """Apply filters over frequency as convolutions; their outputs are in the order of torch's."""
    add = graph.add
    frames = add("Reshape", [rows, graph.integers(-1, STACK, NUM_BINS)])
    heard = _convolution(graph, filters.first, frames, FIRST_BINS, FIRST_STRIDE)
    outputs = add("Transpose", [_convolution(graph, filters.second, heard)], perm=[0, 2, 1])
    shape = graph.slice(add("Shape", [rows]), graph.integers(0), graph.integers(2), 0)
    width = graph.integers(filters.projection.in_features)
    places = add("Reshape", [outputs, add("Concat", [shape, width], axis=0)], allowzero=1)
    return _linear(graph, filters.projection, places)


def _convolution(
    graph: _Graph, filters: nn.Linear, inputs: str, num_places: int = SECOND_PLACES, stride: int = 1
) -> str:
    """Slide a layer, which sees `num_places` places of each channel, along the inputs' places."""
    weights = _array(filters.weight).reshape(filters.out_features, -1, num_places)
    constants = [graph.constant(each, np.float32) for each in (weights, _array(filters.bias))]
    return graph.add("Relu", [graph.add("Conv", [inputs, *constants], strides=[stride])])


def _linear(graph: _Graph, linear: nn.Linear, inputs: str) -> str:
    products = graph.add("MatMul", [inputs, graph.constant(_array(linear.weight).T, np.float32)])
    return graph.add("Add", [products, graph.constant(_array(linear.bias), np.float32)])


def _layer(graph: _Graph, model: LstmModel, layer: int, inputs: str, state: list[str]) -> str:
    names = [f"{kind}_{part}_l{layer}" for kind in ("weight", "bias") for part in ("ih", "hh")]
    w, r, w_bias, r_bias = (_onnx_gates(_array(getattr(model.lstm, name))) for name in names)
    weights = [graph.constant(each[np.newaxis], np.float32) for each in (w, r)]
    bias = graph.constant(np.concatenate([w_bias, r_bias])[np.newaxis], np.float32)
    sequence = f"outputs_{layer}"
    after = [next_name(name) for name in state]
    node = helper.make_node(
        "LSTM",
        [inputs, *weights, bias, "", *state],
        [sequence, *after],
        name=f"lstm_{layer}",
        hidden_size=model.lstm.hidden_size,
    )
    graph.nodes.append(node)
    return graph.add("Squeeze", [sequence, graph.integers(1)])


def _onnx_gates(weights: np.ndarray) -> np.ndarray:
    """Reorder torch's gates (input, forget, cell, output) as ONNX has them: i, o, f, c."""
    i, f, c, o = np.split(weights, 4)
    return np.concatenate([i, o, f, c])


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def export_model(
    store: ObjectStore,
    run_uri: str,
    recipe: Recipe,
    name: str,
    precision: ExportPrecision = "float32",
) -> ExportedModel:
    """Export model `name`, such as the student; ValueError for a form without explicit state.

    Settings are those tuned on development speakers where there are some, else the recipe's.
    """
    form = recipe.models.of(name)
    try:
        require_exportable(form)
    except ValueError as error:
        raise ValueError(f"{name} cannot be exported: {error}") from error
    trained = load_model(store, run_uri, name, form)
    assert isinstance(trained.model, LstmModel)
    network = streaming_graph(trained.model, recipe.features.mean)
    settings = recipe_settings(recipe.evaluation)
    if DEV in subsets_of_run(store, run_uri):
        settings = tuned_settings(store, run_uri)[name]
    tree = read_tree(store, run_uri)
    exported = ExportedSettings(
        format=3,
        name=name,
        precision=precision,
        engine=recipe.features.engine,
        delay=form.delay,
        acoustic_scale=settings.acoustic_scale,
        beam=recipe.evaluation.beam,
        max_active=recipe.evaluation.max_active,
        lattice_beam=recipe.evaluation.lattice_beam,
        language_model_scale=settings.language_model_scale,
        insertion_penalty=settings.insertion_penalty,
        silence=tuple(sorted({int(each) for each in tree.table[:, SILENCE_ID].flat})),
        log_priors=tuple(trained.log_priors.tolist()),
    )
    data = in_int8(network) if precision == "int8" else network.SerializeToString()
    graphs = BuiltGraphs.of(store, run_uri)
    second_pass = graphs.second_pass(settings, recipe.evaluation.lattice_beam)
    return ExportedModel(data, graphs.graph, second_pass.first_pass, second_pass.grammar, exported)


@dataclass(frozen=True, slots=True)
class HeldoutScore:
    """HeldoutScore: word errors over the utterances whose audio can be heard, and the others."""

    errors: WordErrors
    num_utterances: int
    num_refused: int


def score_heldout(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    features: ExtractionConfig,
    exported: ExportedModel,
    piece_s: float,
) -> HeldoutScore:
    """Count the word errors of the held-out subset, heard in pieces of `piece_s` seconds."""
    errors, num_utterances, num_refused = WordErrors(), 0, 0
    heard = transcribe_heldout(store, run_uri, corpus_uri, features, exported, piece_s)
    for utterance, words in heard:
        if words is None:
            num_refused += 1
            continue
        num_utterances += 1
        errors += word_errors((utterance.text or "").split(), words)
    return HeldoutScore(errors, num_utterances, num_refused)


def transcribe_heldout(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    features: ExtractionConfig,
    exported: ExportedModel,
    piece_s: float,
) -> Iterator[tuple[Utterance, tuple[str, ...] | None]]:
    """Transcribe the held-out subset as extraction reads it: a speaker's utterances are a stream.

    So the causal mean is that of the features which the evaluation decodes. The words are None
    where the audio is refused.
    """
    model, step = StreamingModel(exported.network), round(piece_s * SAMPLE_RATE_HZ)
    for output in read_manifest(store, run_uri, selection_step(HELDOUT)).outputs:
        lines = read_output(store, run_uri, output).decode().splitlines()
        utterances = [parse_utterance(line) for line in lines]
        settings = features.gets_in_flight, features.conversion
        audio = audio_objects(store, corpus_uri, utterances, *settings)
        speaker, states = "", defaultdict[str | None, StreamState](model.start)
        for utterance, fetched in zip(utterances, audio.read_decided(), strict=True):
            if utterance.speaker_id != speaker:
                speaker, states = utterance.speaker_id, defaultdict(model.start)
            samples = _samples(utterance, fetched, features)
            if samples is None:
                yield utterance, None
                continue
            recognizer = Recognizer(exported, model, state=states[utterance.stream])
            pieces = (samples[first : first + step] for first in range(0, len(samples), step))
            said = [*map(recognizer.accept, pieces), recognizer.finish()]
            finals = (each.words for each in said if each.is_final)
            yield utterance, tuple(chain.from_iterable(finals))
            states[utterance.stream] = recognizer.state


def _samples(
    utterance: Utterance, fetched: Fetched | StoreError | AudioError, features: ExtractionConfig
) -> Float32[np.ndarray, " samples"] | None:
    """Decode an utterance as extraction does; None for audio that extraction refuses."""
    if not isinstance(fetched, Fetched):
        return None
    about = utterance.utterance_id, utterance.duration_s
    try:
        decoded = decode_utterance(fetched.data, *about, features.engine, features.conversion)
    except AudioError:
        return None
    return decoded.samples if num_frames(len(decoded.samples)) >= MIN_FRAMES else None
