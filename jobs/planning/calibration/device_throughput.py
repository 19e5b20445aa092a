"""Time the recipe's models on this machine's device, forward and through a training step."""

import platform
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import torch

from jobs.planning.calibration.throughputs import DeviceRates, ModelRate
from pipeline.filterbank import FRAME_SHIFT_MS
from pipeline.splicing import NUM_INPUTS, STACK
from training.cost_model.measured_rates import measure_messages
from training.cost_model.step_time import Calibration as ScalingCalibration
from training.cost_model.step_time import RankRates
from training.data.minibatch import Minibatch
from training.data.row_order import chunked_shape
from training.data.targets import HardTargets
from training.fit.cuda_graph import gradients_of
from training.fit.model_specs import loop_of
from training.models.parameter_count import num_parameters
from training.models.precision import fastest_precision, set_float32_products
from training.models.store import make_model
from training.settings.model_training import SupervisedConfig
from training.settings.models import ModelConfig
from training.settings.recipe import Recipe, StudentConfig
from training.trainers.registry import make_optimizer

MAX_FRAMES = 512
"""Frames a minibatch on a core: the paper's models need seconds for them; more gain nothing."""


def measure_device(recipe: Recipe, utterance_seconds: float) -> DeviceRates:
    """Time the recipe's models on this machine's GPU, or on one thread of its CPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks and servers do: on CPUs, a device is a core
    try:
        return _measure(recipe, utterance_seconds, device)
    finally:
        torch.set_num_threads(threads)


def measure_student(recipe: Recipe, device: torch.device) -> ModelRate:
    """Time training steps of the recipe's student on minibatches of chunks, as its job takes them.

    On a GPU its gradients are a graph, in the recipe's precision.
    """
    return training_rate(recipe.models.student, recipe.student, recipe.senones.max_senones, device)


def measure_rank(
    calibration: ScalingCalibration, recipe: Recipe, density: float
) -> ScalingCalibration:
    """Measure this machine's GPU, or one thread of its CPU, as the rank of `calibration`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a rank of the trainers has one, too
    try:
        student = measure_student(recipe, device)
        messages = measure_messages(density, device)
    finally:
        torch.set_num_threads(threads)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    today = datetime.now(UTC).date().isoformat()
    rank = RankRates(
        frames_per_s=student.frames_per_s,
        num_parameters=student.num_parameters,
        encoded_elements_per_s=messages.encoded_elements_per_s,
        decoded_words_per_s=messages.decoded_words_per_s,
    )
    source = f"rank measured on {name}, {today}; else: {calibration.source}"
    return replace(calibration, source=source, rank=rank)


def _max_frames(device: torch.device) -> int:
    return MAX_FRAMES if device.type == "cpu" else 1 << 20


def _measure(recipe: Recipe, utterance_seconds: float, device: torch.device) -> DeviceRates:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "one core"
    models, senones = recipe.models, recipe.senones.max_senones
    limit = _max_frames(device)
    request = min(recipe.targets.request_frames, limit)
    length = max(round(utterance_seconds * 1000 / (STACK * FRAME_SHIFT_MS)), 1)
    return DeviceRates(
        source=f"measured on {name}: training on {min(recipe.student.minibatch_frames, limit)} "
        f"frames in chunks, forward on {request}",
        student_training=measure_student(recipe, device),
        teacher_training=training_rate(models.teacher, recipe.teacher, senones, device),
        teacher_forward=forward_rate(models.teacher, senones, request, length, device),
    )


def training_rate(
    config: ModelConfig,
    training: SupervisedConfig | StudentConfig,
    num_senones: int,
    device: torch.device,
) -> ModelRate:
    """Time low-rate frames through forward, backward, clipping and the optimizer's step."""
    model = make_model(config, num_senones).to(device).train()
    optimizer = make_optimizer(training.optimizer, model.parameters())
    frames = min(training.minibatch_frames, _max_frames(device))
    loop = replace(loop_of(training), minibatch_frames=frames)
    compute = gradients_of(model, loop)
    batch, length = chunked_shape(frames)
    features = torch.randn(batch, length, NUM_INPUTS, device=device)
    labels = torch.randint(num_senones, (batch, length), device=device)
    minibatch = Minibatch(features, torch.full((batch,), length), HardTargets(labels))

    def step() -> None:
        optimizer.zero_grad()
        compute(minibatch)
        optimizer.step()

    set_float32_products(loop.precision)
    try:
        return _rate(step, batch * length, config, num_senones, device)
    finally:
        set_float32_products("float32")


def forward_rate(
    config: ModelConfig, num_senones: int, request_frames: int, length: int, device: torch.device
) -> ModelRate:
    """Time the forward pass of a request of whole utterances, in a teacher's precision."""
    model = make_model(config, num_senones).to(device).eval()
    count = max(request_frames // length, 1)
    utterances = [torch.randn(length, NUM_INPUTS, device=device) for _ in range(count)]
    precision = fastest_precision(device)

    def request() -> object:
        return model.utterance_logits(utterances, precision)

    set_float32_products("tf32" if precision == "bfloat16" else "float32")
    try:
        return _rate(request, count * length, config, num_senones, device)
    finally:
        set_float32_products("float32")


def _rate(
    function: Callable[[], object],
    num_frames: int,
    config: ModelConfig,
    num_senones: int,
    device: torch.device,
) -> ModelRate:
    function()
    # Other work on the machine only adds time, so the fastest round is the device's.
    best, spent = float("inf"), 0.0
    while spent < 0.25:
        started = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started
        best, spent = min(best, seconds), spent + seconds
    return ModelRate(num_frames / best, num_parameters(config, num_senones))
