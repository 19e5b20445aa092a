"""Calibration of one rank for the cost model: a training step, and GTC's messages."""

import platform
from dataclasses import replace
from datetime import UTC, datetime

import torch

from jobs.planning.calibration.device_throughput import measure_student
from training.cost_model.calibration import Calibration, RankRates
from training.cost_model.message_rates import measure_messages
from training.recipes import Recipe


def measure_here(calibration: Calibration, recipe: Recipe, density: float) -> Calibration:
    """`calibration` with this machine's GPU, or one thread of its CPU, as the rank."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the trainers' ranks do: on CPUs, a rank is a core
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
