"""SLURM: a step that is not Spark's is a batch script, whose hosts meet at the first of them."""

import shlex
from dataclasses import dataclass, field
from typing import Annotated

from infra.platforms.platform import Environment, StepLaunch
from infra.settings import ConfigurationError, Text, check_ranges

_LEADER, _JOB = "@leader@", "@job@"

_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
{directives}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={logs}/%x-%j.log
# {title}: a requeued job resumes from its last checkpoint.
set -euo pipefail
{exports}hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export leader="${{hosts%%[[:space:]]*}}"
# Each host finds `python` in the environment that all of them see.
export PATH={environment}/bin:$PATH
srun --kill-on-bad-exit=1 {command}
"""


@dataclass(frozen=True)
class Slurm:
    """Slurm names a partition, and the folders of an environment and of logs that all hosts see.

    `account` and `gres` are those of sbatch; an empty one is left out. Without `gres` hosts with
    GPUs are asked for by --gpus-per-node.
    """

    partition: Annotated[str, Text(1, 100, r"[\w.,-]+", "gpu")]
    python_environment: Annotated[str, Text(2, 1000, r"/[\w./-]+", "/shared/megahour/venv")]
    logs: Annotated[str, Text(2, 1000, r"/[\w./-]+", "/shared/megahour/logs")]
    time_limit: Annotated[str, Text(1, 20, r"(\d+-)?\d+(:\d\d){0,2}", "2-00:00:00")]
    account: Annotated[str, Text(0, 100, r"[\w.-]*", "speech")] = ""
    gres: Annotated[str, Text(0, 100, r"[\w.:-]*", "gpu:v100:8")] = ""
    environment: Environment = field(default_factory=dict)

    __post_init__ = check_ranges

    def request(self, launch: StepLaunch) -> str:
        """Return a script for sbatch; ConfigurationError for a Spark step."""
        if launch.starter == "Spark":
            remedy = f"run megahour {launch.step} on one host, with --cluster and master = local[*]"
            raise ConfigurationError(f"slurm: {launch.step}: it is Spark's: {remedy}")
        gpus = launch.cluster.gpus_per_instance
        options = {
            "partition": self.partition,
            "account": self.account,
            "time": self.time_limit,
            "gres": self.gres,
            "gpus-per-node": str(gpus) if gpus and not self.gres else "",
        }
        command = shlex.join(launch.host_command(_LEADER, _JOB))
        return _SCRIPT.format(
            name=launch.name,
            directives="\n".join(
                f"#SBATCH --{key}={text}" for key, text in options.items() if text
            ),
            nodes=launch.cluster.num_instances,
            logs=self.logs,
            title=" ".join(launch.title.split()),
            exports="".join(
                f"export {key}={shlex.quote(text)}\n" for key, text in self.environment.items()
            ),
            environment=self.python_environment,
            command=command.replace(_LEADER, '"$leader"').replace(_JOB, '"$SLURM_JOB_ID"'),
        )
