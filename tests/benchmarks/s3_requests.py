"""Count requests of the four steps, by driver and tasks, beside those that each plan needs.

python -m tests.benchmarks.s3_requests [--speakers 20] [--utterances 10]
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import boto3

from infra.store.object_store import ObjectStore, join_uri
from infra.store.retry import MAX_ASKS
from infra.task_metrics import REQUEST_KINDS, REQUESTS, MeasuredFunction, RequestCounts, TaskTotals
from pipeline.runs.manifest import read_manifest
from tests.four_steps import OUTPUTS, four_steps, put_teacher
from tests.s3_server import CREDENTIALS, running_s3_server
from tests.small_corpus import serially, write_corpus

NUM_BUCKETS = 1


@dataclass(frozen=True)
class StepRequests:
    """StepRequests holds a step's requests in driver and tasks, the expected, and those a unit."""

    step: str
    num_tasks: int
    num_objects: int
    num_utterances: int
    driver: RequestCounts
    tasks: RequestCounts
    expected_driver: RequestCounts
    expected_tasks: RequestCounts

    @property
    def agrees(self) -> bool:
        """Return whether no request is made that the plan does not need."""
        pairs = ((self.driver, self.expected_driver), (self.tasks, self.expected_tasks))
        return all(
            getattr(ours, k) == getattr(plan, k) for ours, plan in pairs for k in REQUEST_KINDS
        )


def expected_driver(step: str, absent: int) -> RequestCounts:
    """Return the requests of a fresh step's driver: three kinds of reading, one of writing.

    GETs: its own manifest and the record of its run's bases, which are `absent` GETs each, and each
    input's twice, for its digest and its outputs. Selection reads the record twice. LISTs, each
    confirmed by a second one: the step's commits; in extraction also those of the tasks that merge
    its means; in selection those of both passes over the metadata, the metadata, and what the other
    subsets selected. PUT: the manifest.
    """
    gets = {"selection": 0, "features": 2, "targets": 3, "partitions": 4}[step]
    lists = {"selection": 12, "features": 4}.get(step, 2)
    num_absent = 3 if step == "selection" else 2
    return RequestCounts(get=gets + num_absent * absent, put=1, list=lists)


def expected_tasks(
    step: str, num_tasks: int, num_objects: int, num_inputs: int, num_utterances: int, absent: int
) -> RequestCounts:
    """Return the requests of a step's tasks: no LIST, no HEAD, a PUT per object and per commit.

    Each task looks for its commit, which is `absent` GETs. Selection reads each metadata object
    four times (digest, two passes and the id index), and once what each bucket's passes set aside;
    the index reads each file. The others read each input once; extraction reads each utterance.
    """
    puts = num_objects + num_tasks
    if step == "selection":
        aside = 2 * NUM_BUCKETS  # objects, and as many commits
        hashed = NUM_BUCKETS + 1  # of each bucket, and of the files: so many parts of one range
        indexed = num_inputs + num_objects + hashed
        gets = 3 * num_inputs + aside + indexed + (num_tasks + aside + hashed + 1) * absent
        return RequestCounts(get=gets, put=puts + 2 * aside + 2 * (hashed + 1))
    inputs = {"features": num_inputs + num_utterances, "targets": num_inputs}
    gets = inputs.get(step, 2 * num_inputs) + num_tasks * absent
    if step == "features":
        # Each task stores its streams' means; one task gathers these, and one merges a range.
        gets += 2 * num_tasks + 1 + 2 * absent
        puts += num_tasks + 2 * 2
    return RequestCounts(get=gets, put=puts)


def count_step(
    store: ObjectStore,
    run_uri: str,
    step: str,
    run: Callable[[], object],
    tasks: TaskTotals,
    num_inputs: int,
) -> StepRequests:
    """Run one step and count."""
    before, before_tasks = REQUESTS.total(), tasks.requests
    run()
    in_tasks = tasks.requests - before_tasks
    in_driver = REQUESTS.total() - before - in_tasks
    manifest = read_manifest(store, run_uri, f"{step}/unlabelled")
    num_utterances, num_objects = manifest.tally_in.utterances, len(manifest.outputs)
    commits = store.list(join_uri(run_uri, f"{step}/unlabelled/commits"))
    # S3 is asked several times before it is believed that an object is absent.
    absent = MAX_ASKS if run_uri.startswith("s3://") else 1
    return StepRequests(
        step,
        len(commits),
        num_objects,
        num_utterances,
        in_driver,
        in_tasks,
        expected_driver(step, absent),
        expected_tasks(step, len(commits), num_objects, num_inputs, num_utterances, absent),
    )


def count_requests(
    store: ObjectStore, run_uri: str, corpus_uri: str, num_speakers: int, num_each: int
) -> list[StepRequests]:
    """Write a corpus, run the four steps on it, and count each step's requests."""
    write_corpus(store, corpus_uri, "unlabelled", num_speakers, num_each)
    put_teacher(store, run_uri)
    tasks = TaskTotals()
    steps = four_steps(store, run_uri, corpus_uri, partial(_measured, tasks))
    counted: list[StepRequests] = []
    for step in OUTPUTS:
        num_inputs = counted[-1].num_objects if counted else 1  # of metadata
        counted.append(count_step(store, run_uri, step, steps[step], tasks, num_inputs))
    return counted


def _measured(totals: TaskTotals, elements, function, description) -> list:
    measured = serially(elements, MeasuredFunction(function), description)
    return [totals.add(each) for each in measured]


def show(each: StepRequests) -> str:
    """Lay out a step's counts, with the plan's in parentheses."""
    lines = [
        f"{each.step}: {each.num_tasks} tasks, {each.num_objects} objects, "
        f"{each.num_utterances} utterances"
    ]
    for name in ("driver", "tasks"):
        ours, plan = getattr(each, name), getattr(each, f"expected_{name}")
        counts = ", ".join(
            f"{k.upper()} {getattr(ours, k)} ({getattr(plan, k)})" for k in REQUEST_KINDS
        )
        lines.append(f"  {name}: {counts}")
    total = each.driver + each.tasks
    lines.append(
        f"  {total.num_requests / each.num_utterances:.3f} requests an utterance, "
        f"{total.num_requests / each.num_objects:.2f} an object; {total.retries} retried; "
        f"{'as planned' if each.agrees else 'NOT AS PLANNED'}"
    )
    return "\n".join(lines)


def main() -> None:
    """Count the requests of the four steps against moto."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speakers", type=int, default=20)
    parser.add_argument("--utterances", type=int, default=10, help="of each speaker")
    arguments = parser.parse_args()
    with running_s3_server() as endpoint:
        os.environ.update({**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint})
        boto3.client("s3").create_bucket(Bucket="requests")
        store = ObjectStore(("s3://requests",))
        sizes = arguments.speakers, arguments.utterances
        counted = count_requests(store, "s3://requests/run", "s3://requests/corpus", *sizes)
    print("\n".join(show(each) for each in counted))


if __name__ == "__main__":
    main()
