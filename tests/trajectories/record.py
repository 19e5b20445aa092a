"""Record the golden trajectories again: `python -m tests.trajectories.record`; see README.md."""

import json
from dataclasses import asdict
from pathlib import Path

from tests.trajectories.exact_training import OPTIMIZERS, TRAINERS, Step, Trajectory, train

FOLDER = Path(__file__).parent
NAMES = [
    (trainer, optimizer)
    for trainer in TRAINERS
    for optimizer in OPTIMIZERS
    # 1-bit SGD alone takes plain SGD, and no other optimizer.
    if trainer.startswith("one_bit") == (optimizer == "plain")
]


def golden_path(trainer_name: str, optimizer_name: str) -> Path:
    return FOLDER / f"{trainer_name}_{optimizer_name}.json"


def write(trajectory: Trajectory, path: Path) -> None:
    """Write one line for each step, so that a difference shows its first step."""
    steps = ",\n".join(f"  {json.dumps(asdict(step))}" for step in trajectory.steps)
    rest = f'"state_digest": "{trajectory.state_digest}", "final": {json.dumps(trajectory.final)}'
    path.write_text(f'{{"steps": [\n{steps}\n],\n{rest}}}\n')


def read(path: Path) -> Trajectory:
    document = json.loads(path.read_text())
    steps = [Step(**step) for step in document.pop("steps")]
    return Trajectory(steps, **document)


if __name__ == "__main__":
    for names in NAMES:
        write(train(*names), golden_path(*names))
