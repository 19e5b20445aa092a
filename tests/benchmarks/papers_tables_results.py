"""Keep finished trainings of the papers' tables in a file, and find the best rates."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.benchmarks.papers_tables_rows import BASELINE, Configuration
from training.settings.trainers import Form

TUNING_SEED, TUNING_RANKS = 0, 64
# Of the mean gradient: divided by the number of ranks whose gradients are summed.
RATES: dict[tuple[str, Form], tuple[float, ...]] = {
    ("sgd", "nesterov"): (0.1, 0.2),
    ("gtc", "nesterov"): (0.4, 0.8, 1.6, 3.2),
    ("bmuf", "nesterov"): (0.05, 0.1, 0.2, 0.4),
    ("htm", "nesterov"): (0.1, 0.2, 0.4, 0.8),
    ("bmuf", "as_printed"): (0.0125, 0.025, 0.05, 0.1),
    ("htm", "as_printed"): (0.0125, 0.025, 0.05, 0.1),
}
RATE_OF_ONE_RANK = 0.1


@dataclass(frozen=True, slots=True)
class Job:
    """Job is one training."""

    configuration: Configuration
    rate: float
    seed: int

    @property
    def learning_rate(self) -> float:
        """Return the first epoch's rate: for summed gradients, at most that of one rank."""
        num_summed = self.configuration.num_summed
        return self.rate if num_summed == 1 else min(self.rate / num_summed, RATE_OF_ONE_RANK)


def tuned_at(trainer: str, form: Form) -> Configuration:
    """Return the configuration that tunes a trainer's rate: block size 50, group size 8."""
    return {
        "sgd": BASELINE,
        "gtc": Configuration("gtc", TUNING_RANKS),
        "bmuf": Configuration("bmuf", TUNING_RANKS, 50, form=form),
        "htm": Configuration("htm", TUNING_RANKS, 50, 8, form),
    }[trainer]


def tuning_jobs() -> Iterator[Job]:
    """List every rate of every trainer, on a separate seed."""
    for (trainer, form), rates in RATES.items():
        for rate in rates:
            yield Job(tuned_at(trainer, form), rate, TUNING_SEED)


class Results:
    """Results keeps accuracies after each epoch, in memory and, line by line, in a file."""

    def __init__(self, path: Path | None, settings: Mapping[str, object]) -> None:
        self._path = path
        self._settings = dict(settings)
        self.accuracies: dict[Job, list[float]] = {}
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        for record in map(json.loads, lines):
            if record["settings"] != self._settings:
                raise ValueError(
                    f"{path} has results of {record['settings']}, not of {self._settings}: give "
                    "another --resume file"
                )
            configuration = Configuration(**record["configuration"])
            job = Job(configuration, record["rate"], record["seed"])
            self.accuracies[job] = record["accuracies"]

    def add(self, job: Job, accuracies: Sequence[float], cpu_s: float) -> None:
        """Keep one training's accuracies."""
        self.accuracies[job] = list(accuracies)
        if self._path is not None:
            record = asdict(job) | {"accuracies": list(accuracies), "cpu_s": cpu_s}
            with self._path.open("a") as file:
                file.write(json.dumps(record | {"settings": self._settings}) + "\n")

    def best_rate(self, trainer: str, form: Form) -> float:
        """Return the best rate of the finished tuning jobs."""
        configuration = tuned_at(trainer, form)
        jobs = [Job(configuration, rate, TUNING_SEED) for rate in RATES[trainer, form]]
        if not all(job in self.accuracies for job in jobs):
            raise ValueError(f"the learning rate of {trainer}, {form}, is not tuned yet: train on")
        return max(jobs, key=lambda job: self.accuracies[job][-1]).rate

    def tuned(self, configuration: Configuration, seed: int) -> Job:
        """Return a configuration at its trainer's best rate."""
        rate = self.best_rate(configuration.trainer, configuration.form)
        return Job(configuration, rate, seed)

    def final(self, configuration: Configuration, seed: int) -> float | None:
        """Return the accuracy after the last epoch, if that training is finished."""
        found = self.accuracies.get(self.tuned(configuration, seed))
        return found[-1] if found else None

    def relative(self, configuration: Configuration, seeds: Iterable[int]) -> list[float]:
        """Return percent above or below one rank, for each seed of which both are finished."""
        pairs = [(self.final(configuration, seed), self.final(BASELINE, seed)) for seed in seeds]
        return [100 * (mine / one - 1) for mine, one in pairs if mine and one]
