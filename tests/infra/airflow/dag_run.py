"""Run a DAG as Airflow's dag.test() does, in Airflow's own environment: FOLDER NAME DATE [TASKS].

Tasks whose ids match the regular expression TASKS are not run, and pass for done. Its last line is
one JSON object: the state, each task's state and tries, and the assets that this run has added.
"""

import json
import sys
from datetime import datetime

from airflow.dag_processing.dagbag import DagBag
from airflow.models.asset import AssetEvent
from airflow.utils.session import create_session
from sqlalchemy import select

folder, name, date, *tasks_left_out = sys.argv[1:]
bag = DagBag(folder)
assert not bag.import_errors, bag.import_errors
dag = bag.dags[name]
run = dag.test(
    logical_date=datetime.fromisoformat(f"{date}T00:00:00+00:00"),
    mark_success_pattern=tasks_left_out[0] if tasks_left_out else None,
)
events = select(AssetEvent).where(
    AssetEvent.source_dag_id == name, AssetEvent.source_run_id == run.run_id
)
with create_session() as session:
    assets = sorted(event.asset.uri for event in session.scalars(events))
tasks = {each.task_id: [str(each.state), each.try_number] for each in run.get_task_instances()}
order = [task.task_id for task in dag.topological_sort()]
document = {"state": str(run.state), "order": order, "tasks": tasks, "assets": assets}
print(json.dumps(document), flush=True)
