"""The run table: each step of a run, with what starts it, what it reads and what it writes.

A step is a command of jobs/ that writes manifests, each in a folder of its own below the run. All
that lists, checks, plans, verifies or schedules steps reads this table, so that a new step is its
own file and one row here. To list the commands is quick: this module imports no NumPy, and the
descriptions of models only where a recipe asks for them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from infra.extras import Extra
from infra.settings import plain
from jobs.volumes import (
    PlannedStep,
    Volume,
    Workload,
    bootstrap,
    by_hours,
    evaluation,
    extraction,
    labelling,
    realignment,
    repartition,
    selection,
    training,
)
from pipeline.runs.names import (
    ALIGNER,
    ALIGNMENT_STEP,
    ALL_SUBSETS,
    BASELINE,
    BOOTSTRAP_STEP,
    CERTIFICATE_STEP,
    DEV,
    DEV_ALIGNMENT_STEP,
    EVALUATION_STEP,
    GRAPH_STEP,
    HELDOUT,
    INGEST_STEP,
    KBEST_COSTS_STEP,
    LABELLED,
    PARTITIONS_STEP,
    REPORT_STEP,
    STUDENT,
    SUBSETS,
    TARGETS_STEP,
    TARGETS_TUNING_STEP,
    TEACHER,
    TUNING_STEP,
    UNLABELLED,
    TargetsRound,
    features_step,
    lattices_step,
    model_step,
    realignment_rounds,
    section_of,
    selection_step,
    targets_rounds,
)
from training.settings.decoding import (
    bootstrap_settings,
    graph_settings,
    kbest_costs_settings,
    lattice_settings,
    realignment_settings,
    rescoring_orders,
    search_of_targets,
    transcripts_tuning_settings,
)

if TYPE_CHECKING:
    from infra.cluster import Cluster
    from training.fit.model_specs import Fit
    from training.settings.recipe import Recipe

Starter = Literal["python", "Spark", "torchrun"]


@dataclass(frozen=True, slots=True)
class Written:
    """Written is one manifest of a step: `name` is its folder below the run.

    It is made from the manifests of the steps `reads`, with the `settings` that the recipe decides,
    or by the training `fit`. Its tasks read the shards of the step `hours_of`, `times_read` times;
    without one, its hours are not known before. Runs without development speakers lack an optional
    one. An increment inherits it from its base, extends the base's, or makes it anew. What is made
    of labelled speech alone is inherited by each run that has a base. Its command may delete
    what `is_replaced`: old checkpoints, the previous report.
    """

    name: str
    reads: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    fit: "Fit | None" = None
    hours_of: str = ""
    times_read: int = 1
    holds_utterances: bool = True
    is_optional: bool = False
    is_replaced: bool = False
    in_increment: Literal["labelled", "inherited", "extended", "made"] = "made"


@dataclass(frozen=True, slots=True)
class Step:
    """Step is a row of the table: a command, its starter, and what it writes under a recipe.

    `trains` names the recipe's section whose model its ranks train. A step with a device takes
    --device: it trains or scores in its own processes. `volume` states what a step makes, asks for
    and computes, so that it can be planned; other steps on Spark or torchrun are planned by their
    hours: a core works through X_REAL_TIME of them in one.
    """

    name: str
    starter: Starter
    writes: "Callable[[Recipe], Sequence[Written]]"
    trains: str = ""
    has_device: bool = False
    writes_corpus: bool = False
    reads_audio: bool = False
    also_on_spark: bool = False
    volume: Callable[[PlannedStep], list[Volume]] | None = None

    @property
    def is_on_spark(self) -> bool:
        """True if a Spark cluster may run it: ingest too, where it reads manifests."""
        return self.starter == "Spark" or self.also_on_spark

    @property
    def extras(self) -> tuple[Extra, ...]:
        """Return the extras of megahour that it needs: for Spark, and for models."""
        of_spark: tuple[Extra, ...] = ("spark",) if self.is_on_spark else ()
        return of_spark if self.name in _WITHOUT_MODELS else (*of_spark, "train")

    def reads(self, recipe: "Recipe") -> tuple[str, ...]:
        """Return the steps whose manifests it reads, without those that it writes itself."""
        written = sorted(self.writes(recipe), key=lambda each: each.is_optional)
        own = {each.name for each in written}
        read = dict.fromkeys(name for each in written for name in each.reads)
        return tuple(name for name in read if name not in own)

    def volumes(self, workload: Workload, recipe: "Recipe", cluster: "Cluster") -> list[Volume]:
        """Return the volumes of the step's parts, which run one after the other."""
        planned = PlannedStep(workload, recipe, cluster, self.writes(recipe))
        return self.volume(planned) if self.volume else by_hours(planned)


INGEST, SELECT_UTTERANCES, EXTRACT_FEATURES = "ingest", "select_utterances", "extract_features"
BOOTSTRAP, TRAIN_ALIGNER, REALIGN = "bootstrap", "train_aligner", "realign"
BUILD_GRAPH = "build_graph"
TRAIN_BASELINE, TRAIN_TEACHER = "train_baseline", "train_teacher"
GENERATE_TARGETS, REPARTITION, TRAIN_STUDENT = "generate_targets", "repartition", "train_student"
EVALUATE, CERTIFY, REPORT = "evaluate", "certify", "report"

_WITHOUT_MODELS = (INGEST, SELECT_UTTERANCES, EXTRACT_FEATURES, REPARTITION)


def _ingested(_: "Recipe") -> list[Written]:
    return [Written(INGEST_STEP, holds_utterances=False)]


def _selections(recipe: "Recipe") -> list[Written]:
    return [_of_subset(subset, selection_step(subset), recipe.selection) for subset in ALL_SUBSETS]


def _features(recipe: "Recipe") -> list[Written]:
    return [
        _of_subset(subset, features_step(subset), recipe.features, selection_step(subset))
        for subset in ALL_SUBSETS
    ]


def _of_subset(subset: str, name: str, settings: object, source: str = "") -> Written:
    return Written(
        name,
        (source,) if source else (),
        plain(settings),
        hours_of=source,
        is_optional=subset == DEV,
        in_increment="extended" if subset == UNLABELLED else "labelled",
    )


def _bootstrap(recipe: "Recipe") -> list[Written]:
    versions, rule = recipe.alignment.versions, recipe.corpus.unknown_words
    text = recipe.spelled_text
    settings = bootstrap_settings(recipe.bootstrap, recipe.senones, versions, rule, text)
    labelled = features_step(LABELLED)
    # Letters pronounce the words of development speakers, too.
    reads = (labelled, *([features_step(DEV)] if rule == "letters" else []))
    return [Written(BOOTSTRAP_STEP, reads, settings, hours_of=labelled, in_increment="labelled")]


def _realignments(recipe: "Recipe") -> list[Written]:
    config, of_dev = recipe.alignment, features_step(DEV)
    rounds = realignment_rounds(config.rounds)

    def aligned(name: str, features: str, aligner: str) -> Written:
        regrown = recipe.senones if config.regrow_tree and aligner == ALIGNER else None
        relabelled = (ALIGNMENT_STEP,) if regrown and features == of_dev else ()
        scale = recipe.evaluation.acoustic_scale
        return Written(
            name,
            (features, BOOTSTRAP_STEP, model_step(aligner), *relabelled),
            realignment_settings(scale, config.versions, regrown),
            hours_of=features,
            is_optional=features == of_dev,
            in_increment="labelled",
        )

    of_rounds = [aligned(each.writes, features_step(LABELLED), each.aligner) for each in rounds]
    return [*of_rounds, aligned(DEV_ALIGNMENT_STEP, of_dev, ALIGNER)]


def _graph(recipe: "Recipe") -> list[Written]:
    orders = rescoring_orders(recipe.evaluation, recipe.tuning, recipe.targets.lattices)
    return [
        Written(
            GRAPH_STEP,
            (ALIGNMENT_STEP, BOOTSTRAP_STEP),
            graph_settings(recipe.evaluation, orders),
            holds_utterances=False,
            in_increment="labelled",
        )
    ]


def _trained(fit: "Fit") -> Written:
    return Written(
        model_step(fit.name),
        # Other fits than newbob's show a validation, on which nothing that they store depends.
        tuple(fit.on_development_speakers().inputs),
        fit=fit,
        holds_utterances=False,
        is_replaced=True,
        in_increment="labelled" if fit.unlabelled is None else "made",
    )


def _models(section: str, recipe: "Recipe") -> list[Written]:
    """Return what is written by models that train, and that sMBR trains on where it is asked to."""
    from training.fit.model_specs import fits_of, sequence_fit  # noqa: PLC0415 - imports boto3

    config, found = recipe.sequence_training, list[Written]()
    settings = lattice_settings(config.lattices, config.acoustic_scale)
    for fit in fits_of(recipe, section):
        trained = _trained(fit)
        found.append(trained)
        if section_of(fit.name) in config.models:
            lattices = Written(
                lattices_step(fit.name),
                (ALIGNMENT_STEP, BOOTSTRAP_STEP, model_step(fit.name)),
                settings,
                hours_of=ALIGNMENT_STEP,
                in_increment=trained.in_increment,
            )
            by_sequence = _trained(sequence_fit(recipe, fit))
            # It learns from labelled speech, but goes on where the other has begun.
            found += [lattices, replace(by_sequence, in_increment=trained.in_increment)]
    return found


def _targets(recipe: "Recipe") -> list[Written]:
    rounds, features = targets_rounds(recipe.targets.rounds), features_step(UNLABELLED)
    search, searched = list[Written](), tuple[str, ...]()
    of_search = partial(Written, holds_utterances=False, in_increment="inherited")
    tuned_by = (features_step(DEV), ALIGNMENT_STEP, *_labelling(recipe, rounds[0])[:1])
    if recipe.targets.source == "transcripts":
        tuned = transcripts_tuning_settings(recipe.targets, recipe.evaluation)
        graph = (GRAPH_STEP,) if recipe.targets.needs_graph else ()
        tuned_by = (*tuned_by[:2], *graph, *tuned_by[2:])
        search = [of_search(TARGETS_TUNING_STEP, tuned_by, tuned, is_optional=True)]
        searched = (*graph, TARGETS_TUNING_STEP)
    if recipe.targets.source == "lattice":
        tuned_by = (features_step(DEV), ALIGNMENT_STEP, GRAPH_STEP, *tuned_by[2:])
        search = [of_search(TARGETS_TUNING_STEP, tuned_by, _tuning(recipe), is_optional=True)]
        searched = (GRAPH_STEP, TARGETS_TUNING_STEP)
    labelled = partial(
        Written,
        settings=recipe.targets.settings | search_of_targets(recipe.targets, recipe.evaluation),
        hours_of=features,
        in_increment="extended",
    )
    return [
        *search,
        *(labelled(e.targets, (features, *searched, *_labelling(recipe, e))) for e in rounds),
    ]


def _labelling(recipe: "Recipe", targets_round: TargetsRound) -> tuple[str, ...]:
    """Return the models that label in a round; the tree, for a teacher of the user's own."""
    models = recipe.labelling_models(targets_round)
    return (*(() if recipe.num_teachers else (ALIGNMENT_STEP,)), *map(model_step, models))


def _tuning(recipe: "Recipe") -> dict[str, Any]:
    return {"evaluation": plain(recipe.evaluation), "tuning": plain(recipe.tuning)}


def _partitions(recipe: "Recipe") -> list[Written]:
    features, settings = features_step(UNLABELLED), asdict(recipe.partitions)
    joined = partial(Written, settings=settings, hours_of=features, in_increment="extended")
    rounds = targets_rounds(recipe.targets.rounds)
    return [joined(each.partitions, (features, each.targets)) for each in rounds]


def _evaluation(recipe: "Recipe") -> list[Written]:
    scored = tuple(map(model_step, recipe.evaluated_models))
    rounds = targets_rounds(recipe.targets.rounds)
    heldout, unlabelled = features_step(HELDOUT), features_step(UNLABELLED)
    costs = kbest_costs_settings(recipe.targets, recipe.targets.teacher)
    made = partial(Written, holds_utterances=False)
    return [
        made(
            TUNING_STEP,
            (features_step(DEV), ALIGNMENT_STEP, GRAPH_STEP, *scored),
            _tuning(recipe),
            is_optional=True,
        ),
        made(
            EVALUATION_STEP,
            (unlabelled, heldout, TUNING_STEP, ALIGNMENT_STEP, GRAPH_STEP, *scored),
            plain(recipe.evaluation),
            hours_of=heldout,
            times_read=len(scored),
        ),
        made(
            KBEST_COSTS_STEP,
            (unlabelled, *_labelling(recipe, rounds[-1]), model_step(STUDENT)),
            costs,
            is_optional=True,
        ),
    ]


def _certificate(recipe: "Recipe") -> list[Written]:
    from training.fit.model_specs import student_fit  # noqa: PLC0415 - imports boto3

    reads = (selection_step(UNLABELLED), features_step(UNLABELLED), PARTITIONS_STEP)
    config = student_fit(recipe).config
    return [Written(CERTIFICATE_STEP, reads, config, holds_utterances=False)]


def _report(recipe: "Recipe") -> list[Written]:
    reads = (
        *(EVALUATION_STEP, TARGETS_STEP),
        *map(selection_step, SUBSETS),
        *map(features_step, SUBSETS),
        *(selection_step(DEV), features_step(DEV)),
        *map(model_step, recipe.evaluated_models),
    )
    return [Written(REPORT_STEP, reads, holds_utterances=False, is_replaced=True)]


def _training(name: str, section: str) -> Step:
    writes = partial(_models, section)
    return Step(name, "torchrun", writes, trains=section, has_device=True, volume=training)


_ROWS = (
    Step(INGEST, "python", _ingested, writes_corpus=True, reads_audio=True, also_on_spark=True),
    Step(SELECT_UTTERANCES, "Spark", _selections, volume=selection),
    Step(EXTRACT_FEATURES, "Spark", _features, reads_audio=True, volume=extraction),
    Step(BOOTSTRAP, "Spark", _bootstrap, volume=bootstrap),
    _training(TRAIN_ALIGNER, ALIGNER),
    Step(REALIGN, "Spark", _realignments, has_device=True, volume=realignment),
    Step(BUILD_GRAPH, "python", _graph),
    _training(TRAIN_BASELINE, BASELINE),
    _training(TRAIN_TEACHER, TEACHER),
    Step(GENERATE_TARGETS, "Spark", _targets, reads_audio=True, volume=labelling),
    Step(REPARTITION, "Spark", _partitions, volume=repartition),
    _training(TRAIN_STUDENT, STUDENT),
    Step(EVALUATE, "Spark", _evaluation, has_device=True, volume=evaluation),
    Step(CERTIFY, "python", _certificate),
    Step(REPORT, "python", _report),
)

STEPS: dict[str, Step] = {step.name: step for step in _ROWS}
"""The steps of a run by name, in the order in which they run."""


def spark_steps() -> list[str]:
    """Return the steps that a Spark cluster may run."""
    return [name for name, step in STEPS.items() if step.is_on_spark]


def written(recipe: "Recipe") -> dict[str, Written]:
    """Return all that the steps of a run write under a recipe, by name.

    Each comes after what it reads, also where rounds repeat steps, and else in a run's order.
    """
    by_name = {each.name: each for step in STEPS.values() for each in step.writes(recipe)}
    found: dict[str, Written] = {}

    def add(each: Written) -> None:
        for name in each.reads:
            if name in by_name and name not in found:
                add(by_name[name])
        found[each.name] = each

    for each in by_name.values():
        if each.name not in found:
            add(each)
    return found


def due_steps(recipe: "Recipe", name: str, has: Callable[[str], bool]) -> list[str]:
    """Return the steps that the command `name` writes, if it starts where the run `has` others.

    A later round's are not due before the round before has been through the other commands. What
    only some runs write is left out.
    """
    optional, found = optional_steps(recipe), list[str]()
    for each in STEPS[name].writes(recipe):
        needed = (step for step in each.reads if step not in optional and step not in found)
        if not each.is_optional and all(map(has, needed)):
            found.append(each.name)
    return found


def written_steps(recipe: "Recipe", name: str) -> tuple[str, ...]:
    """Return the steps whose manifests the command `name` writes under a recipe."""
    return tuple(each.name for each in STEPS[name].writes(recipe))


def optional_steps(recipe: "Recipe") -> set[str]:
    """Return the steps that a run lacks without development speakers, or by its recipe."""
    return {name for name, each in written(recipe).items() if each.is_optional}


def utterance_reads(recipe: "Recipe") -> dict[str, list[str]]:
    """Return the steps that hold utterances, each with the steps that it reads.

    The first of these has the shards that its tasks read.
    """
    return {
        name: list(dict.fromkeys((each.hours_of, *each.reads)))
        for name, each in written(recipe).items()
        if each.holds_utterances and each.hours_of
    }


def step_configs(
    recipe: "Recipe", trained: "Recipe", has_dev: bool = False
) -> dict[str, Mapping[str, Any]]:
    """Return the settings that recipes decide by step; `trained` has the trainers of the models.

    With `has_dev`, newbob's loss is of the development speakers.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for step in STEPS.values():
        for each in step.writes(trained if step.trains else recipe):
            if each.fit is not None:
                fit = each.fit.on_development_speakers() if has_dev else each.fit
                found[each.name] = fit.config
            elif each.settings:
                found[each.name] = each.settings
    return found
