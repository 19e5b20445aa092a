"""Check the settings of a model that ranks divide: its form, its trainer, the numbers of ranks."""

from training.configuration.models import LstmConfig, ModelConfig
from training.configuration.trainers import TrainerConfig
from training.configuration.values import Precision

TRAINERS_OF_GROUPS = ("htm",)
"""Trainers that divide the ranks of a world, which those of one part are not."""


def check_model_parallel(num_parts: int, trainer: TrainerConfig, precision: Precision) -> None:
    """Raise ValueError where a divided model cannot be trained so."""
    if num_parts == 1:
        return
    said = f"model_parallel_ranks = {num_parts}"
    if precision != "float32":
        raise ValueError(f"{said}: precision = {precision!r}: need 'float32'")
    if trainer.name in TRAINERS_OF_GROUPS or getattr(trainer, "ranks_per_leader", 1) != 1:
        raise ValueError(
            f"{said}: trainer {trainer.name!r} divides ranks into groups itself: need one without "
            "groups and with ranks_per_leader = 1, such as 'one_bit'"
        )


def check_divisible(model: ModelConfig, num_parts: int) -> None:
    """Raise ValueError where a model's units cannot be divided among so many ranks."""
    if not isinstance(model, LstmConfig) or model.bidirectional:
        raise ValueError(
            f"student: model_parallel_ranks = {num_parts}: need a unidirectional LSTM in "
            "models.student, or 1"
        )
    if model.num_units < num_parts:
        raise ValueError(
            f"student: model_parallel_ranks = {num_parts}: need at most {model.num_units}, "
            "models.student.num_units"
        )


def data_parallel_ranks(num_ranks: int, num_parts: int) -> int:
    """Return how many ranks hold the same units; ValueError where a rank would be left over."""
    if num_ranks % num_parts:
        raise ValueError(
            f"model_parallel_ranks = {num_parts}: need a divisor of {num_ranks}, the ranks"
        )
    return num_ranks // num_parts
