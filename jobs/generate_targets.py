"""Label frames with the teacher's k best logits (003 IV-B3, V-C).

megahour generate_targets --recipe demo --run runs/demo
"""

from infra.devices.device_pool import DevicePool
from jobs.cli.catalogue import GENERATE_TARGETS
from jobs.cli.command_line import Step, StepResults, main
from jobs.cli.job import Job
from jobs.cli.spark_steps import distribute_on_spark
from pipeline.runs.names import TEACHER, UNLABELLED, features_step, model_step, sequence_trained
from pipeline.steps.targets import generate_targets
from training.targets.teacher import PooledTeacher

IDLE_TIMEOUT_S = 20.0


def run(job: Job) -> StepResults:
    """Label all unlabelled feature shards with the servers of the teacher, one a device."""
    k = job.recipe.targets.k
    # Sequence-trained before it labels, as the paper's teacher (003 VII-C4).
    is_trained_on = job.recipe.sequence_training.teacher
    model = sequence_trained(TEACHER) if is_trained_on else TEACHER
    pool = DevicePool(
        factory="training.targets.teacher:serve_teacher",
        arguments={"run_uri": job.run_uri, "k": str(k), "model": model},
        devices=job.cluster.devices,
        idle_timeout_s=IDLE_TIMEOUT_S,
    )
    with distribute_on_spark(job) as distribute:
        teacher = PooledTeacher(pool, k)
        return [
            generate_targets(job.store, job.run_uri, job.recipe.targets, teacher, distribute, model)
        ]


STEP = Step(
    name=GENERATE_TARGETS,
    description="Label every frame of the unlabelled features with the teacher's k best logits "
    "(paper 003 IV-B3, V-C). Each host starts one server process for each "
    "device that the cluster file names; its tasks share them.",
    reads=(features_step(UNLABELLED), model_step(TEACHER)),
    run=run,
)

if __name__ == "__main__":
    main(STEP)
