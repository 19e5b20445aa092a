"""Time training in bfloat16 against float32, and measure int8 exports of 8 and of 7 bits, on a CPU.

OMP_NUM_THREADS=1 python -m tests.benchmarks.low_precision

Training: forward and backward passes of librispeech's student and teacher, 16 chunks of 32 frames,
as the model is asked for each, whatever `training_precision` would choose. Int8: the root mean
square of the logits' errors, of their standard deviation. Rates are of one run, in turns.
"""

import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch
from onnx import helper
from onnxruntime.quantization import quantize_dynamic

from jobs.cli.arguments import recipe_path
from pipeline.filterbank import NUM_INPUTS
from tests.training.export.test_streaming_logits import energies, streaming_graph, student
from training.export.recognizer import StreamingModel
from training.models.precision import has_bfloat16
from training.models.store import make_model
from training.settings.models import LstmConfig
from training.settings.recipe import read_recipe

ROUNDS, NUM_SENONES, NUM_CHUNKS, CHUNK = 5, 1200, 16, 32


def step_seconds(name: str) -> None:
    """Print the seconds of a step in either precision, and their ratio."""
    config = getattr(read_recipe(recipe_path("librispeech")).models, name)
    model = make_model(config, NUM_SENONES).train()
    frames = torch.randn(NUM_CHUNKS, CHUNK, NUM_INPUTS)
    seconds: dict[str, list[float]] = {"float32": [], "bfloat16": []}
    for _ in range(ROUNDS + 1):
        for precision, taken in seconds.items():
            started = time.perf_counter()
            model(frames, None, precision).log_softmax(-1)[..., 0].mean().backward()
            taken.append(time.perf_counter() - started)
    plain, rounded = (median(each[1:]) for each in seconds.values())
    ratios = [b / a for a, b in zip(*(each[1:] for each in seconds.values()), strict=True)]
    print(
        f"{name}: float32 {plain:.3f} s, bfloat16 {rounded:.3f} s a step: "
        f"{median(ratios):.1f} times ({min(ratios):.1f}..{max(ratios):.1f})"
    )


def int8_error(num_filters: int, *, reduce_range: bool) -> float:
    """Return the error of a student's logits by weights of 7 bits, or of 8."""
    config = LstmConfig(2, 64, False, look_ahead=3, dropout=0.0, num_filters=num_filters)
    network = streaming_graph(student(config))
    helper.set_model_props(network, {"onnx.quant.pre_process": "onnxruntime.quant"})
    with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
        kinds = ["LSTM", "MatMul"]
        quantize_dynamic(
            network, Path(file.name), op_types_to_quantize=kinds, reduce_range=reduce_range
        )
        rounded = StreamingModel(Path(file.name).read_bytes())
    plain, heard = StreamingModel(network.SerializeToString()), energies(90)[np.newaxis]
    expected, found = (each.advance(heard, each.start())[0] for each in (plain, rounded))
    return float(np.sqrt(np.square(found - expected).mean()) / expected.std())


def main() -> None:
    """Print all."""
    torch.set_num_threads(1)
    known = "multiplies" if has_bfloat16(torch.device("cpu")) else "does not multiply"
    print(f"{torch.backends.cpu.get_cpu_capability()}, which {known} bfloat16")
    for name in ("student", "teacher"):
        step_seconds(name)
    for num_filters in (0, 8):
        eight, seven = (int8_error(num_filters, reduce_range=each) for each in (False, True))
        print(
            f"int8, {num_filters} filters: 8 bits {100 * eight:.1f} %, 7 bits {100 * seven:.1f} %"
        )


if __name__ == "__main__":
    main()
