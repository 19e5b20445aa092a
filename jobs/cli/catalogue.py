"""List the commands of megahour in the order of a run, without importing them."""

import ast
from collections.abc import Collection, Mapping
from importlib.resources import files
from itertools import chain
from typing import Literal

from pipeline.runs.names import (
    ALIGNMENT_STEP,
    ALL_SUBSETS,
    BASELINE,
    BOOTSTRAP_STEP,
    CERTIFICATE_STEP,
    DEV,
    DEV_ALIGNMENT_STEP,
    EVALUATED_MODELS,
    EVALUATION_STEP,
    HELDOUT,
    INGEST_STEP,
    KBEST_COSTS_STEP,
    LABELLED,
    PARTITIONS_STEP,
    REPORT_STEP,
    STUDENT,
    SUBSETS,
    TARGETS_GRAPH_STEP,
    TARGETS_STEP,
    TARGETS_TUNING_STEP,
    TEACHER,
    TUNING_STEP,
    UNLABELLED,
    alignment_steps,
    features_step,
    lattices_step,
    model_step,
    section_of,
    selection_step,
    sequence_trained,
    targets_rounds,
    teachers,
)

Starter = Literal["python", "Spark", "torchrun"]

INGEST, SELECT_UTTERANCES, EXTRACT_FEATURES = "ingest", "select_utterances", "extract_features"
ALIGN, TRAIN_BASELINE, TRAIN_TEACHER = "align", "train_baseline", "train_teacher"
GENERATE_TARGETS, REPARTITION, TRAIN_STUDENT = "generate_targets", "repartition", "train_student"
EVALUATE, CERTIFY, REPORT = "evaluate", "certify", "report"

STEPS: Mapping[str, Starter] = {
    INGEST: "python",
    SELECT_UTTERANCES: "Spark",
    EXTRACT_FEATURES: "Spark",
    ALIGN: "Spark",
    TRAIN_BASELINE: "torchrun",
    TRAIN_TEACHER: "torchrun",
    GENERATE_TARGETS: "Spark",
    REPARTITION: "Spark",
    TRAIN_STUDENT: "torchrun",
    EVALUATE: "Spark",
    CERTIFY: "python",
    REPORT: "python",
}
"""The steps of a run in order, each with the program that starts its processes."""

SPARK_STEPS = (INGEST, *(step for step, starter in STEPS.items() if starter == "Spark"))
"""The steps that a Spark cluster may run: ingest does where it reads manifests."""

STEPS_WITH_DEVICE = (ALIGN, TRAIN_BASELINE, TRAIN_TEACHER, TRAIN_STUDENT, EVALUATE)
"""The steps that train or score in their own processes; Spark's tasks share a cluster's devices."""

WRITES: Mapping[str, tuple[str, ...]] = {
    INGEST: (INGEST_STEP,),
    SELECT_UTTERANCES: tuple(map(selection_step, ALL_SUBSETS)),
    EXTRACT_FEATURES: tuple(map(features_step, ALL_SUBSETS)),
    ALIGN: (*alignment_steps(1), DEV_ALIGNMENT_STEP),
    TRAIN_BASELINE: (model_step(BASELINE),),
    TRAIN_TEACHER: (model_step(TEACHER),),
    GENERATE_TARGETS: (TARGETS_STEP,),
    REPARTITION: (PARTITIONS_STEP,),
    TRAIN_STUDENT: (model_step(STUDENT),),
    EVALUATE: (TUNING_STEP, EVALUATION_STEP, KBEST_COSTS_STEP),
    CERTIFY: (CERTIFICATE_STEP,),
    REPORT: (REPORT_STEP,),
}
"""The folders below a run into which each step writes a manifest, whatever the recipe.

OPTIONAL_STEPS are among them, which runs with development speakers have.
"""

_FEATURES = features_step(LABELLED), features_step(UNLABELLED)

READS: Mapping[str, tuple[str, ...]] = {
    INGEST: (),
    SELECT_UTTERANCES: (),
    EXTRACT_FEATURES: tuple(map(selection_step, ALL_SUBSETS)),
    ALIGN: _FEATURES,
    TRAIN_BASELINE: (ALIGNMENT_STEP, DEV_ALIGNMENT_STEP, *_FEATURES),
    TRAIN_TEACHER: (ALIGNMENT_STEP, DEV_ALIGNMENT_STEP, *_FEATURES),
    GENERATE_TARGETS: (
        features_step(UNLABELLED),
        BOOTSTRAP_STEP,
        model_step(TEACHER),
        TARGETS_TUNING_STEP,
    ),
    REPARTITION: (features_step(UNLABELLED), TARGETS_STEP),
    TRAIN_STUDENT: (ALIGNMENT_STEP, PARTITIONS_STEP, *_FEATURES),
    EVALUATE: (
        features_step(UNLABELLED),
        features_step(HELDOUT),
        TUNING_STEP,
        ALIGNMENT_STEP,
        *map(model_step, EVALUATED_MODELS),
    ),
    CERTIFY: (selection_step(UNLABELLED), features_step(UNLABELLED), PARTITIONS_STEP),
    REPORT: (
        EVALUATION_STEP,
        TARGETS_STEP,
        *map(model_step, EVALUATED_MODELS),
        *map(selection_step, SUBSETS),
        *map(features_step, SUBSETS),
        selection_step(DEV),
        features_step(DEV),
    ),
}
"""The folders below a run whose manifests each step reads, of one teacher without sMBR.

They are listed here, as the modules of most steps import torch.
"""

TRAINS: Mapping[str, str] = {
    TRAIN_BASELINE: BASELINE,
    TRAIN_TEACHER: TEACHER,
    TRAIN_STUDENT: STUDENT,
}
"""The model that each training step makes."""


def writes_of(
    step: str,
    num_rounds: int,
    trained_on: Collection[str] = (),
    has_lattice_targets: bool = False,
    ensemble: int = 1,
    num_target_rounds: int = 1,
) -> tuple[str, ...]:
    """Return where `step` writes manifests.

    There are `num_rounds` of realignment and `num_target_rounds` of targets, sMBR trains the models
    `trained_on` on, and so many teachers are an ensemble. Lattice targets need a graph.
    """
    first, *later = targets_rounds(num_target_rounds)
    if step == GENERATE_TARGETS:
        search = (TARGETS_TUNING_STEP, TARGETS_GRAPH_STEP) if has_lattice_targets else ()
        return (*search, *(each.targets for each in (first, *later)))
    if step == REPARTITION:
        return tuple(each.partitions for each in (first, *later))
    if step == ALIGN:
        return (*alignment_steps(num_rounds), DEV_ALIGNMENT_STEP)
    if step not in TRAINS:
        return WRITES[step]
    models: tuple[str, ...] = (TRAINS[step],)
    if step == TRAIN_TEACHER:
        models = (*teachers(ensemble), *(n for each in later for n in each.siblings(ensemble)))
    by_model = ((model_step(model), *sequence_steps(model, trained_on)) for model in models)
    return tuple(chain.from_iterable(by_model))


def sequence_steps(model: str, trained_on: Collection[str]) -> tuple[str, ...]:
    """Return where sequence training of `model` writes manifests, if it is trained on."""
    if section_of(model) not in trained_on:
        return ()
    return lattices_step(model), model_step(sequence_trained(model))


CHECK = "check"
"""The command that `run` gives first."""

INSPECT = "inspect"

STORY: Mapping[str, Mapping[str, Starter]] = {
    "Before a run": dict.fromkeys(("synthesize", "plan", "scaling", "package", CHECK), "python"),
    "A whole run": dict.fromkeys(("demo", "run"), "python"),
    "The steps of a run, in order": STEPS,
    "Clusters and schedulers": dict.fromkeys(("roles", "request_cluster", "workflow"), "python"),
    "Second attempts at a run": dict.fromkeys(("retry",), "python"),
    "Questions to a run": dict.fromkeys(
        ("status", INSPECT, "verify", "inspect_utterance"), "python"
    ),
    "After a run": dict.fromkeys(("export", "transcribe", "export_shards"), "python"),
}
"""All commands by chapter."""


def module_of(command: str) -> str:
    """Return the name of a command's file in jobs."""
    # A job that is started by its path would take jobs/inspect.py for Python's own module.
    return "inspect_object" if command == INSPECT else command


def summary_of(command: str) -> str:
    """Return the first line of the docstring of jobs/<command>.py, which describes it."""
    source = (files("jobs") / f"{module_of(command)}.py").read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(source))
    assert docstring is not None, f"jobs/{command}.py has no docstring"
    return docstring.partition("\n")[0]
