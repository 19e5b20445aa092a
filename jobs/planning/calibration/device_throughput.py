"""Calibration of the device at hand: the recipe's models forward, and through a training step."""

import time
from collections.abc import Callable

import numpy as np
import torch

from jobs.planning.calibration.throughputs import DeviceRates, ModelRate
from jobs.planning.volumes.training_volumes import num_parameters
from pipeline.filterbank import FRAME_SHIFT_MS
from pipeline.splicing import NUM_INPUTS, STACK
from training.data.batching import CHUNK_FRAMES
from training.data.minibatch import Minibatch
from training.fit.steps import minibatch_loss
from training.models.acoustic_model import AcousticModel, ModelConfig
from training.recipes import Recipe

MAX_FRAMES = 512
"""On a core the paper's models need seconds for so many; larger minibatches are hardly faster."""


def measure_device(recipe: Recipe, utterance_seconds: float) -> DeviceRates:
    """The recipe's models on this machine's GPU, or on one thread of its CPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the jobs' ranks and servers do: on CPUs, a device is a core
    try:
        return _measure(recipe, utterance_seconds, device)
    finally:
        torch.set_num_threads(threads)


def measure_student(recipe: Recipe, device: torch.device) -> ModelRate:
    """Frames a second of the recipe's student through training steps on minibatches of chunks."""
    frames = min(recipe.student.minibatch_frames, _max_frames(device))
    return training_rate(recipe.models.student, recipe.senones.max_senones, frames, device)


def _max_frames(device: torch.device) -> int:
    return MAX_FRAMES if device.type == "cpu" else 1 << 20


def _measure(recipe: Recipe, utterance_seconds: float, device: torch.device) -> DeviceRates:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "one core"
    models, senones = recipe.models, recipe.senones.max_senones
    limit = _max_frames(device)
    chunked = min(recipe.student.minibatch_frames, limit)
    request = min(recipe.targets.request_frames, limit)
    length = max(round(utterance_seconds * 1000 / (STACK * FRAME_SHIFT_MS)), 1)
    return DeviceRates(
        source=f"measured on {name}: training on {chunked} frames in chunks, forward on {request}",
        student_training=measure_student(recipe, device),
        teacher_training=training_rate(models.teacher, senones, chunked, device),
        teacher_forward=forward_rate(models.teacher, senones, request, length, device),
    )


def training_rate(
    config: ModelConfig, num_senones: int, minibatch_frames: int, device: torch.device
) -> ModelRate:
    """Low-rate frames a second through forward, backward and the optimizer's step."""
    model = AcousticModel(config, num_senones).to(device).train()
    optimizer = torch.optim.Adam(model.parameters())
    batch = max(minibatch_frames // CHUNK_FRAMES, 1)
    features = torch.randn(batch, CHUNK_FRAMES, NUM_INPUTS, device=device)
    lengths = torch.full((batch,), CHUNK_FRAMES)
    labels = torch.randint(num_senones, (batch, CHUNK_FRAMES), device=device)
    minibatch = Minibatch(features, lengths, labels, None, None)

    def step() -> None:
        optimizer.zero_grad()
        loss, _ = minibatch_loss(model, minibatch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return _rate(step, batch * CHUNK_FRAMES, config, num_senones, device)


def forward_rate(
    config: ModelConfig, num_senones: int, request_frames: int, length: int, device: torch.device
) -> ModelRate:
    """Low-rate frames a second of a request of whole utterances, logits brought back."""
    model = AcousticModel(config, num_senones).to(device).eval()
    count = max(request_frames // length, 1)
    utterances = [torch.randn(length, NUM_INPUTS, device=device) for _ in range(count)]

    def request() -> list[np.ndarray]:
        return [rows.cpu().numpy() for rows in model.utterance_logits(utterances)]

    return _rate(request, count * length, config, num_senones, device)


def _rate(
    function: Callable[[], object],
    num_frames: int,
    config: ModelConfig,
    num_senones: int,
    device: torch.device,
) -> ModelRate:
    function()
    best, spent = float("inf"), 0.0
    while spent < 0.25:
        started = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started
        best, spent = min(best, seconds), spent + seconds
    return ModelRate(num_frames / best, num_parameters(config, num_senones))
