"""Run megahour's workflows in Airflow: a DAG for each file that `megahour workflow` has written.

This file knows Airflow and command lines, and nothing of megahour: Airflow's environment need not
have it. Put it into the DAG folder, and the workflows beside it, as NAME.workflow.json.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from airflow.providers.standard.hooks.subprocess import SubprocessHook
from airflow.sdk import DAG, Asset, AssetAlias, BaseOperator, TaskGroup
from airflow.sdk.exceptions import AirflowException, AirflowFailException

FOLDER = Path(os.environ.get("MEGAHOUR_WORKFLOWS", Path(__file__).parent))

WILL_NOT_PASS = (2, 3)
"""Exit codes for bad usage and for a loss budget exceeded: a second attempt would end so, too."""


class StepOperator(BaseOperator):
    """StepOperator runs a step's command without a shell; a retry resumes the step."""

    template_fields = ("command",)

    def __init__(
        self,
        *,
        command: Sequence[str],
        environment: Mapping[str, str],
        **settings: Any,  # noqa: ANN401 - Airflow's own
    ) -> None:
        super().__init__(**settings)
        self.command = list(command)
        self.environment = dict(environment)
        self._hook = SubprocessHook()

    def execute(self, context: Mapping[str, Any]) -> None:
        """Run the command; raise AirflowFailException where a retry is useless."""
        del context
        environment = {**os.environ, **self.environment}
        result = self._hook.run_command(self.command, env=environment)
        if result.exit_code in WILL_NOT_PASS:
            raise AirflowFailException(f"exit code {result.exit_code}: {result.output}")
        if result.exit_code:
            raise AirflowException(f"exit code {result.exit_code}: {result.output}")

    def on_kill(self) -> None:
        """End the command, and with it all processes that it has started."""
        self._hook.send_sigterm()


class ManifestsOperator(BaseOperator):
    """ManifestsOperator says which manifests a step has written, as assets."""

    template_fields = ("uris",)

    def __init__(
        self,
        *,
        uris: Sequence[str],
        alias: AssetAlias,
        **settings: Any,  # noqa: ANN401 - Airflow's own
    ) -> None:
        super().__init__(outlets=[alias], **settings)
        self.uris = list(uris)
        self.alias = alias

    def execute(self, context: Mapping[str, Any]) -> None:
        """Add the manifests; their URIs hold the date only now, so an alias stands for them."""
        for uri in self.uris:
            place = uri if "://" in uri else f"file://{uri}"
            context["outlet_events"][self.alias].add(Asset(place))


def make_dag(workflow: Mapping[str, Any]) -> DAG:
    """Return a DAG with a task group for each step, one after the other."""
    dag = DAG(
        workflow["name"],
        schedule=workflow["schedule"],
        start_date=datetime.fromisoformat(workflow["start_date"]),
        catchup=False,
        max_active_runs=1,  # two nights would share the machines of one
        default_args={
            "retries": workflow["retries"],
            "retry_delay": timedelta(seconds=workflow["retry_delay_s"]),
        },
        tags=["megahour"],
    )
    with dag:
        before: TaskGroup | None = None
        for step in workflow["steps"]:
            group = _step_group(workflow["name"], step, workflow["environment"])
            if before is not None:
                before >> group
            before = group
    return dag


def _step_group(name: str, step: Mapping[str, Any], environment: Mapping[str, str]) -> TaskGroup:
    with TaskGroup(step["name"]) as group:
        run = StepOperator(task_id="run", command=step["command"], environment=environment)
        alias = AssetAlias(f"{name}.{step['name']}")
        manifests = ManifestsOperator(task_id="manifests", uris=step["manifests"], alias=alias)
        run >> manifests
    return group


def workflows() -> Iterator[dict[str, Any]]:
    """Yield the workflows of the folder."""
    for path in sorted(FOLDER.glob("*.workflow.json")):
        yield json.loads(path.read_text(encoding="utf-8"))


for _workflow in workflows():
    globals()[_workflow["name"]] = make_dag(_workflow)
