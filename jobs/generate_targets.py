"""Label frames with the teacher's k best logits (003 IV-B3, V-C).

megahour generate_targets --recipe demo --run runs/demo
"""

from collections.abc import Sequence

from infra.configuration import canonical_json
from infra.devices.device_pool import DevicePool
from jobs.cli.catalogue import GENERATE_TARGETS
from jobs.cli.command_line import Step, StepResults, main
from jobs.cli.job import Job
from jobs.cli.spark_steps import distribute_on_spark
from pipeline.runs.names import (
    TARGETS_GRAPH_STEP,
    TEACHER,
    UNLABELLED,
    features_step,
    labelling_models,
    model_step,
)
from pipeline.steps.targets import generate_targets
from training.evaluation.target_graph import build_target_graph
from training.targets.lattice_targets import open_lattice_teacher
from training.targets.teacher import PooledTeacher

IDLE_TIMEOUT_S = 20.0
SEARCH_IDLE_TIMEOUT_S = 120.0
"""Between two requests, each task decodes the utterances of one to lattices."""


def run(job: Job) -> StepResults:
    """Label all unlabelled feature shards with the servers of the teacher, one a device."""
    if job.recipe.targets.source == "lattice":
        return label_with_lattices(job)
    k = job.recipe.targets.k
    models = labelling_models(job.recipe.sequence_training.models, job.recipe.teacher.ensemble)
    pool = DevicePool(
        factory="training.targets.teacher:serve_teacher",
        arguments={"k": str(k), **teacher_arguments(job, models)},
        devices=job.cluster.devices,
        idle_timeout_s=IDLE_TIMEOUT_S,
    )
    with distribute_on_spark(job) as distribute:
        teacher = PooledTeacher(pool, k)
        return [
            generate_targets(
                job.store, job.run_uri, job.recipe.targets, teacher, distribute, models
            )
        ]


def label_with_lattices(job: Job) -> StepResults:
    """Build the graph of the teacher's search, then label by the servers' logits and lattices."""
    recipe, where = job.recipe, (job.store, job.run_uri)
    config = recipe.targets
    graph = build_target_graph(*where, job.corpus_uri, recipe.evaluation, config.lattices)
    models = labelling_models(recipe.sequence_training.models, recipe.teacher.ensemble)
    pool = DevicePool(
        factory="training.targets.lattice_targets:serve_logits",
        arguments=teacher_arguments(job, models),
        devices=job.cluster.devices,
        idle_timeout_s=SEARCH_IDLE_TIMEOUT_S,
    )
    teacher = open_lattice_teacher(*where, pool.request, config.k, config.lattices)
    graphs, limit = (TARGETS_GRAPH_STEP,), recipe.loss_budget
    with distribute_on_spark(job) as distribute:
        targets = generate_targets(*where, config, teacher, distribute, models, graphs, limit)
    return [graph, targets]


def teacher_arguments(job: Job, models: Sequence[str]) -> dict[str, str]:
    """Return the arguments of servers: the run, its teachers, and the recipe's settings of them."""
    form = canonical_json(job.recipe.models.of(TEACHER))
    return {"run_uri": job.run_uri, "form": form, "models": ",".join(models)}


STEP = Step(
    name=GENERATE_TARGETS,
    description="Label every frame of the unlabelled features with the teacher's k best logits "
    "(paper 003 IV-B3, V-C), at one offset of each utterance or at all three (targets.offsets). "
    "Several teachers (teacher.ensemble) label with the mean of their posteriors. Each host starts "
    "one server process for each device that the cluster file names; its tasks share them. With "
    "targets.source = 'lattice' each task also decodes its utterances with the language model of "
    "the evaluation, and the lattices' state posteriors enter the targets. An utterance without a "
    "lattice keeps the teacher's own; loss_budget bounds how many these may be.",
    reads=(features_step(UNLABELLED), model_step(TEACHER)),
    run=run,
)

if __name__ == "__main__":
    main(STEP)
