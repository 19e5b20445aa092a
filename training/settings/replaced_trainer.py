"""Put another trainer in the place of a recipe's, as --trainer asks for.

What is a rate, a block or a threshold of one trainer is none of another. So rates are rescaled
where the papers' equations give the ratio, and refused where they do not; blocks and thresholds are
the new trainer's own. A user's --set has the last word.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from infra.settings import (
    TAG,
    ConfigurationError,
    apply_overrides,
    canonical_json,
    plain,
    read_record,
)
from training.settings.trainers import (
    TRAINERS,
    AdamConfig,
    OneBitConfig,
    OptimizerConfig,
    RateUnit,
    SgdConfig,
    TrainerConfig,
)

RATES = ("initial_learning_rate", "final_learning_rate")

OWN_SETTINGS = ("block_size", "block_momentum", "gradient_threshold")
"""Settings that several trainers have, with values that are of one alone.

000 has blocks of 50 steps, 003 VI-C of 100 for BMUF; GTC's threshold is 8, HTM's 2 (000 3.2). Eq.
(5) has a block momentum for each number of models.
"""

THRESHOLD_FRAMES = 2048
"""The minibatch of the papers' thresholds: a gradient is a sum, which grows with its frames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Section:
    """_Section is what a section of a recipe says of its trainer."""

    trainer: TrainerConfig
    optimizer: OptimizerConfig = field(default=AdamConfig())

    @property
    def rate_unit(self) -> RateUnit:
        """Return the trainer's; Adam's step is normalized, whatever the trainer gives it."""
        is_plain = isinstance(self.optimizer, SgdConfig)
        return self.trainer.rate_unit if is_plain else RateUnit(1.0, "normalized")


def replace_trainer(
    table: dict[str, Any], section: str, name: str, overrides: Sequence[str], where: str
) -> list[str]:
    """Name another trainer in a section of a recipe's table; return what that changed, in words.

    `overrides` are a user's --set, which are applied to the result later. Raises
    ConfigurationError, with the settings to give, where rates cannot be rescaled.
    """
    settings = table[section]
    old = _read(settings, f"{where}: {section}")
    if old.trainer.name == name:
        return []
    ours = [each for each in overrides if each.partition(".")[0].strip() == section]
    given: Any = apply_overrides({}, ours).get(section, {})
    if not isinstance(given, dict):  # which is refused with the recipe
        return []
    frames = (settings | given).get("minibatch_frames")
    settings["trainer"] = _trainer_table(settings["trainer"], old, name, frames)
    if (optimizer := _optimizer_table(old, name)) is not None:
        settings["optimizer"] = optimizer
    overridden: Any = apply_overrides(table, ours)[section]
    new = _read(overridden, f"{where}: {section}")
    if new.trainer.name != name:
        also = f"--set names {new.trainer.name!r} in {section}.trainer"
        raise ConfigurationError(f"--trainer {name}: {also}: need one of the two")
    rates: dict[str, float] = {
        each: settings[each]
        for each in RATES
        if each not in given and isinstance(settings.get(each), int | float)
    }
    # As printed eta follows from the number of models: of ranks, or of groups.
    is_known = old.rate_unit.over == new.rate_unit.over != "sum as printed"
    if not is_known and rates:
        raise ConfigurationError(f"{where}: {_refusal(section, old, new, rates)}")
    changes = _changes(section, old, new)
    ratio = old.rate_unit.factor / new.rate_unit.factor
    for rate, before in rates.items() if ratio != 1 else ():
        settings[rate] = float(f"{before * ratio:.12g}")
        changes.append(f"{section}.{rate} {before:g} -> {settings[rate]:g}")
    return changes


def _read(settings: Mapping[str, Any], where: str) -> _Section:
    known = {each.name for each in fields(_Section)}
    return read_record(_Section, {k: v for k, v in settings.items() if k in known}, where)


def _trainer_table(
    before: Mapping[str, Any], old: _Section, name: str, minibatch_frames: object
) -> dict[str, Any]:
    """Return the new trainer's settings, of which the recipe has those that mean the same."""
    record = TRAINERS[name]
    known = {each.name for each in fields(record)}
    table = {key: before[key] for key in before if key in known and key not in OWN_SETTINGS}
    default = record()
    if hasattr(default, "gradient_threshold") and isinstance(minibatch_frames, int):
        share = minibatch_frames / THRESHOLD_FRAMES
        table["gradient_threshold"] = default.gradient_threshold * share
    if record is OneBitConfig and isinstance(old.optimizer, SgdConfig):
        table["momentum"] = old.optimizer.momentum
    return table | {TAG: name}


def _optimizer_table(old: _Section, name: str) -> dict[str, Any] | None:
    """Return the optimizer that takes the old one's part; None if that remains.

    1-bit SGD has momentum itself; what AdaGrad normalizes moves a model as Adam does.
    """
    optimizer: OptimizerConfig
    if TRAINERS[name] is OneBitConfig:
        optimizer = SgdConfig(momentum=0.0)
    elif not isinstance(old.trainer, OneBitConfig):
        return None
    elif old.rate_unit.over == "sum":
        optimizer = SgdConfig(momentum=old.trainer.momentum)
    else:
        optimizer = AdamConfig()
    table: dict[str, Any] = plain(optimizer)
    return table


def _changes(section: str, old: _Section, new: _Section) -> list[str]:
    """Say what has another value than in the recipe, or than by default."""
    before, after = plain(old.trainer), plain(new.trainer)
    default, found = plain(TRAINERS[new.trainer.name]()), list[str]()
    for key, value in after.items():
        where = f"{section}.trainer.{key}"
        if key in before and key != TAG and before[key] != value:
            found.append(f"{where} {before[key]} -> {value}")
        elif key not in before and (key in OWN_SETTINGS or value != default[key]) and value:
            found.append(f"{where} = {value}")
    if old.optimizer != new.optimizer:
        each = f"{canonical_json(old.optimizer)} -> {canonical_json(new.optimizer)}"
        found.append(f"{section}.optimizer {each}")
    return found


_SUMS = {
    "sum": "the sum of all ranks' gradients",
    "sum as printed": (
        "1 + eta times the sum of all ranks' gradients, where eta follows from the number of models"
    ),
    "mean over ranks": "the mean over the ranks",
    "mean over groups": "the mean of the groups' models",
    "normalized": "a gradient whose elements are about 1",
    "sum of normalized": "a sum of gradients whose elements are about 1",
}


def _refusal(section: str, old: _Section, new: _Section, rates: Mapping[str, float]) -> str:
    """Say what the rates were of, and which ones to give."""
    units = old.rate_unit, new.rate_unit
    ratio = units[0].factor / units[1].factor
    wanted = dict.fromkeys(rates, "R")
    for averaged, count in (("mean over ranks", "N ranks"), ("mean over groups", "N groups")):
        if (units[0].over, units[1].over) == ("sum", averaged):
            wanted = {each: f"{rate * ratio:g} x N on {count}" for each, rate in rates.items()}
        if (units[0].over, units[1].over) == (averaged, "sum"):
            wanted = {each: f"{rate * ratio:g} / N on {count}" for each, rate in rates.items()}
    for printed, other, factor in ((0, 1, "x (1 + eta)"), (1, 0, "/ (1 + eta)")):
        if (units[printed].over, units[other].over) == ("sum as printed", "sum"):
            wanted = {each: f"{rate * ratio:g} {factor}" for each, rate in rates.items()}
    need = " and ".join(f"--set {section}.{rate}=({value})" for rate, value in wanted.items())
    if isinstance(new.trainer, OneBitConfig) and units[0].over == "sum":
        need += f"; or --set {section}.trainer.adagrad.place=nowhere, which keeps them"
    return (
        f"{section}: the learning rates of {old.trainer.name!r} are of {_SUMS[units[0].over]}, and "
        f"those of {new.trainer.name!r} of {_SUMS[units[1].over]}: need {need}"
    )
