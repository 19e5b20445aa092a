"""Collect the contents of report.json from the manifests and records of a run.

In this order: what one run's steps have stored; date, machine, commit and dollars; the hours of
each subset from ingest to training or evaluation; the reasons of quarantine; the comparison with
another run, and with an oracle, a baseline that learnt from more transcripts.
"""

import json
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from typing import Any, NotRequired, TypedDict

from infra.store.object_store import (
    ObjectNotFound,
    ObjectStore,
    join_uri,
    normalize_uri,
    read_checked,
)
from infra.task_metrics import REQUEST_KINDS
from jobs.cli.arguments import cluster_of
from jobs.cli.job import Job
from jobs.cli.record import parse_job_record
from jobs.planning.run_plan import compare_plan, request_dollars
from jobs.run_table import EVALUATE, REPORT
from jobs.volumes import Requests
from pipeline.records import Tally
from pipeline.runs.ledger import ledger_reasons
from pipeline.runs.manifest import (
    Manifest,
    Output,
    is_finished,
    read_manifest,
    read_output,
    sha256,
    subsets_of_run,
)
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    ALIGNMENTS_FOLDER,
    BASELINE,
    CERTIFICATE_STEP,
    DEV,
    DEV_ALIGNMENT_STEP,
    EVALUATED_MODELS,
    EVALUATION_ERRORS,
    EVALUATION_SCORES,
    EVALUATION_STEP,
    FEATURES_FOLDER,
    GRAPH_STEP,
    HELDOUT,
    INGEST_STEP,
    KBEST_COSTS_STEP,
    LABELLED,
    LATTICES_FOLDER,
    MODELS_FOLDER,
    ORACLE,
    PARTITIONS_STEP,
    REPORT_DOCUMENT,
    SCRATCH_FOLDER,
    SELECTION_FOLDER,
    STEP_RECORDS_FOLDER,
    STUDENT,
    SUBSETS,
    TARGETS_FOLDER,
    TARGETS_STEP,
    TUNING_STEP,
    UNLABELLED,
    alignment_steps,
    evaluated_models,
    features_step,
    folder_of,
    job_record,
    lattices_step,
    model_step,
    section_of,
    selection_step,
    sequence_trained,
    targets_rounds,
)
from pipeline.runs.sealed_json import unseal
from pipeline.steps.features import AUDIO_REASONS
from pipeline.steps.targets import MEAN_MASS, TEACHER_FAILED
from training.evaluate.scores import (
    LEVEL,
    NUM_RESAMPLES,
    SEED,
    Resamples,
    SpeakerCounts,
    compare,
    counts_by_placement,
    resample,
)
from training.evaluate.word_errors import UtteranceErrors, joined, of_models, read_errors
from training.settings.recipe import Recipe

EVERY_SUBSET = "all subsets"
"""The name of what the subsets share: an ingest counts them together."""

Record = Mapping[str, Any]
"""What a job stored of itself when it had ended."""


class CurvePoint(TypedDict):
    """CurvePoint holds what the page shows of a sub-epoch; training wrote more."""

    labelled: bool
    learning_rate: float
    num_frames: int
    cross_entropy: float
    frame_accuracy: float
    validation_cross_entropy: NotRequired[float]
    validation_frame_accuracy: NotRequired[float]
    trainer: NotRequired[dict[str, float]]


def trained_recipe(steps: Mapping[str, Record]) -> dict[str, Any]:
    """Return the evaluation's recipe, with each section that --trainer changed as it trained."""
    changed = {
        section: record["recipe"][section]
        for record in steps.values()
        for section in record["trainers"]
    }
    return {**steps[EVALUATE]["recipe"], **changed}


def build_report(job: Job) -> dict[str, Any]:
    """Collect the contents of report.json."""
    recipe, models = job.recipe, job.evaluated_models
    subsets = [
        subset
        for subset in subsets_of_run(job.store, job.run_uri)
        if subset != UNLABELLED or job.has_unlabelled
    ]
    manifests = manifests_of(job, subsets, models)
    # A corpus that no run has ingested has none.
    ingests = [
        read_manifest(job.store, run, INGEST_STEP)
        for run in (*reversed(job.bases.runs), job.run_uri)
        if is_finished(job.store, run, INGEST_STEP)
    ]
    evaluation = output_of(manifests[EVALUATION_STEP], EVALUATION_SCORES)
    steps = step_records(job)
    if EVALUATE not in steps:
        record = join_uri(job.run_uri, job_record(EVALUATE))
        raise ValueError(f"{record} is missing: run megahour {EVALUATE} again, which stores it")
    return {
        "run": job.run_uri,
        "code_version": manifests[EVALUATION_STEP].code_version,
        "recipe": trained_recipe(steps),
        **json.loads(read_output(job.store, job.run_uri, evaluation)),
        "development": development_errors(job.store, job.run_uri),
        "hours": {s: manifests[features_step(s)].tally_out.hours for s in subsets},
        "steps": {name: step_entry(record) for name, record in steps.items()},
        "origin": origin_of(steps, job.run_uri),
        **{name: runs for name, runs in asdict(job.bases).items() if runs},
        "waterfall": waterfall_of(job.store, job.run_uri, ingests),
        "plan": compare_plan(
            job.store,
            job.run_uri,
            recipe,
            lambda step: cluster_of(step, job.arguments, recipe.cluster),
            steps,
        ),
        "curves": {
            name: manifests[model_step(name)].statistic("curve", list[CurvePoint])
            for name in models
        },
        "targets": targets_facts(manifests[TARGETS_STEP], recipe) if job.has_unlabelled else {},
        "kbest_costs": statistics_of(job, KBEST_COSTS_STEP),
        "device_faults": {
            name: faults for name, record in steps.items() if (faults := record["device_faults"])
        },
        "certificate": statistics_of(job, CERTIFICATE_STEP),
        "quarantine": (lost := quarantine_reasons(manifests, ingests)),
        "retries": retry_commands(lost, job.run_uri, job.arguments.recipe, job.arguments.set),
        "pace": {
            model: pace for record in steps.values() for model, pace in record["pace"].items()
        },
    }


def manifests_of(job: Job, subsets: Collection[str], models: Sequence[str]) -> dict[str, Manifest]:
    """Read the manifests of all steps that a report shows, by step."""
    optional = (selection_step(DEV), features_step(DEV)) if DEV in subsets else ()
    # The evaluation's inputs name the tuning and the models trained on by sMBR, so its digest is
    # theirs, too.
    num_rounds = job.recipe.targets.rounds if job.has_unlabelled else 0
    rounds = (each.targets for each in targets_rounds(num_rounds))
    others = other_ledger_steps(job.store, job.run_uri, job.recipe)
    read = (*required_reads(job), *others, *rounds, *optional, *map(model_step, models))
    return {step: read_manifest(job.store, job.run_uri, step) for step in dict.fromkeys(read)}


def targets_facts(targets: Manifest, recipe: Recipe) -> dict[str, Any]:
    """Return k and the form of the targets, how many teachers made them, and their statistics."""
    return {
        "k": targets.config["k"],
        "offsets": targets.config["offsets"],
        "source": targets.config["source"],
        "tail_samples": targets.config["tail_samples"],
        # A teacher of the user's own is no model of the run.
        "num_teachers": sum(folder_of(name) == MODELS_FOLDER for name in targets.inputs)
        or recipe.num_labelling,
        **targets.statistics,
        "num_frames": targets.statistic("num_frames", int),
        MEAN_MASS: targets.statistic(MEAN_MASS, float),
    }


def statistics_of(job: Job, step: str) -> dict[str, Any]:
    """Return the statistics of a step's manifest; {} where the run lacks the step."""
    return dict(job.manifest(step).statistics) if job.has(step) else {}


def required_reads(job: Job) -> list[str]:
    """Return the steps that each report reads; without unlabelled speech nothing is of it."""
    has_unlabelled, scored = job.has_unlabelled, job.evaluated_models
    subsets = [each for each in SUBSETS if each != UNLABELLED or has_unlabelled]
    models = [each for each in EVALUATED_MODELS if each in scored]
    targets = [TARGETS_STEP] if has_unlabelled else []
    steps = (*map(model_step, models), *map(selection_step, subsets), *map(features_step, subsets))
    return [EVALUATION_STEP, *targets, *steps]


def step_records(job: Job) -> dict[str, Any]:
    """Read the summaries that the steps before this one stored, in the order of their ends."""
    records = []
    for uri in record_uris(job.store, job.run_uri):
        remedy = f"run megahour {_job_of(uri)} again, which stores the record again"
        parse = partial(parse_job_record, remedy=remedy)
        records.append(read_checked(job.store, uri, parse))
    return {record["step"]: record for record in sorted(records, key=lambda r: r["finished_at"])}


def record_uris(store: ObjectStore, run_uri: str) -> list[str]:
    """List the jobs' records, without the report's own; metrics and start records are left out.

    A record's URI is the one that its name has.
    """
    listed = [found.uri for found in store.list(join_uri(run_uri, STEP_RECORDS_FOLDER))]
    records = [uri for uri in listed if uri == join_uri(run_uri, job_record(_job_of(uri)))]
    return [uri for uri in records if _job_of(uri) != REPORT]


def _job_of(uri: str) -> str:
    return uri.rpartition("/")[2].removesuffix(".json")


def step_entry(record: Record) -> dict[str, Any]:
    """Sum the counts of one step over all its manifests; its seconds beside them."""
    tallies = record["manifests"].values()
    counts = ("utterances_in", "utterances_out", "quarantined")
    totals = {name: sum(tally[name] for tally in tallies) for name in counts}
    return {"seconds": record["seconds"], **totals}


def development_errors(store: ObjectStore, run_uri: str) -> dict[str, Mapping[str, Any]]:
    """Return each model's counts and rate as it was chosen; {} without development speakers."""
    if not is_finished(store, run_uri, TUNING_STEP):
        return {}
    tuning = read_manifest(store, run_uri, TUNING_STEP)
    chosen = tuning.statistic("settings", dict[str, dict[str, Any]])
    (output,) = tuning.outputs
    curves = json.loads(read_output(store, run_uri, output))
    return {
        name: next(point["word_errors"] for point in curves[name] if point["settings"] == settings)
        for name, settings in chosen.items()
    }


def origin_of(records: Mapping[str, Record], run_uri: str) -> dict[str, Any]:
    """Return dates, seconds, machines, commits and dollars of the steps' records, and their sums.

    The commit of installed code is not known: "".
    """
    steps = {
        name: {
            "finished_at": record["finished_at"],
            "machine": record["machine"],
            "commit": record["commit"],
            "dollars": dollars_of(record, is_in_s3=run_uri.startswith("s3://")),
        }
        for name, record in records.items()
    }
    ends = {name: datetime.fromisoformat(step["finished_at"]) for name, step in steps.items()}
    begins = [end.timestamp() - records[name]["seconds"] for name, end in ends.items()]
    return {
        "finished_at": max(step["finished_at"] for step in steps.values()),
        "step_seconds": sum(record["seconds"] for record in records.values()),
        "elapsed_seconds": max(end.timestamp() for end in ends.values()) - min(begins),
        "machines": _distinct(steps, "machine"),
        "commits": _distinct(steps, "commit"),
        "dollars": sum(step["dollars"] for step in steps.values()),
        "steps": steps,
    }


def dollars_of(record: Record, is_in_s3: bool) -> float:
    """Return the dollars of a step's instances for its seconds, and of its requests to S3."""
    cluster = record["cluster"]
    hourly = cluster["num_instances"] * cluster["price_per_instance_hour"]
    instances = float(hourly * record["seconds"] / 3600)
    if not is_in_s3:
        return instances
    requests = Requests(**{kind: record["requests"][kind] for kind in REQUEST_KINDS})
    return instances + request_dollars(requests)


def _distinct(steps: Mapping[str, Record], key: str) -> list[str]:
    return [value for value in dict.fromkeys(step[key] for step in steps.values()) if value]


LAST_STEPS: Mapping[str, tuple[str, ...]] = {
    UNLABELLED: (TARGETS_STEP, PARTITIONS_STEP),
    LABELLED: (ALIGNMENT_STEP,),
    HELDOUT: (EVALUATION_STEP,),
    DEV: (),
}
"""The steps that read a subset's features, as far as they keep its utterances."""


def waterfall_of(
    store: ObjectStore, run_uri: str, ingests: Collection[Manifest]
) -> dict[str, list[dict[str, Any]]]:
    """Return each subset's steps, with the milliseconds into, out of, and aside from each.

    Ingest is first, of all subsets and of all runs of a chain together.
    """
    found = {EVERY_SUBSET: [stage_of(INGEST_STEP, ingests)] if ingests else []}
    for subset, last in LAST_STEPS.items():
        found[subset] = [
            stage_of(step, [read_manifest(store, run_uri, step)])
            for step in (selection_step(subset), features_step(subset), *last)
            if is_finished(store, run_uri, step)
        ]
    return {subset: stages for subset, stages in found.items() if stages}


def stage_of(step: str, manifests: Collection[Manifest]) -> dict[str, Any]:
    """Return the milliseconds and utterances of one step's manifests together."""
    quarantined = sum((each.quarantined for each in manifests), Tally())
    return {
        "step": step,
        "in_ms": sum(each.tally_in.duration_ms for each in manifests),
        "out_ms": sum(each.tally_out.duration_ms for each in manifests),
        "unselected_ms": sum(each.unselected.duration_ms for each in manifests),
        "quarantined_ms": quarantined.duration_ms,
        "utterances_out": sum(each.tally_out.utterances for each in manifests),
        "utterances_quarantined": quarantined.utterances,
    }


_RETRIED = {FEATURES_FOLDER: AUDIO_REASONS, TARGETS_FOLDER: (TEACHER_FAILED,)}
"""The reasons of which `megahour retry` takes rows back, by the folder of the step."""

_LEDGERS = (SELECTION_FOLDER, ALIGNMENTS_FOLDER, LATTICES_FOLDER, *_RETRIED)
"""The kinds of step that keep a ledger, beside ingest."""


def other_ledger_steps(store: ObjectStore, run_uri: str, recipe: Recipe) -> list[str]:
    """Return the finished steps that a report reads for their ledgers alone, in a run's order."""
    trained_on = recipe.sequence_training.models
    models = evaluated_models((), recipe.num_teachers, recipe.targets.rounds)
    lattices = (lattices_step(name) for name in models if section_of(name) in trained_on)
    aligned = (*alignment_steps(recipe.alignment.rounds), DEV_ALIGNMENT_STEP)
    with_ledger = (step for step in aligned if folder_of(step) in _LEDGERS)
    steps = (INGEST_STEP, *with_ledger, *lattices)
    return [step for step in steps if is_finished(store, run_uri, step)]


def quarantine_reasons(
    manifests: Mapping[str, Manifest], ingests: Collection[Manifest]
) -> dict[str, dict[str, int]]:
    """Count the reasons of all ledgers; those of the `ingests` of a chain together."""
    of_runs = (ledger_reasons(each.ledgers) for each in ingests)
    ingested: Counter[str] = sum(of_runs, Counter())
    found = {INGEST_STEP: dict(ingested)} if ingests else {}
    return found | {
        name: dict(ledger_reasons(manifest.ledgers))
        for name, manifest in manifests.items()
        if folder_of(name) in _LEDGERS
    }


def retry_commands(
    reasons: Mapping[str, Mapping[str, int]], run_uri: str, recipe: str, overrides: Sequence[str]
) -> list[dict[str, Any]]:
    """Return for each step that `megahour retry` knows a command, safe to paste into a shell.

    What ingest and selection refused is wrong in its metadata: no command reads it.
    """
    settings = [part for override in overrides for part in ("--set", override)]
    found = []
    for step, counts in reasons.items():
        retried = _RETRIED.get(folder_of(step), ())
        if again := sorted(reason for reason in counts if reason in retried):
            only = () if folder_of(step) == TARGETS_FOLDER else ("--step", step)
            command = [
                *("megahour", "retry", "--recipe", recipe, *settings, "--run", run_uri, *only),
                *("--reason", ",".join(again)),
            ]
            found.append({"step": step, "reasons": again, "command": shlex.join(command)})
    return found


@dataclass(frozen=True, slots=True)
class OtherReport:
    """OtherReport is the report of another run, with its digest, and the store to read the run."""

    store: ObjectStore
    run_uri: str
    document: Mapping[str, Any]
    sha256: str

    @property
    def uri(self) -> str:
        """Return the URI of the report."""
        return join_uri(self.run_uri, REPORT_DOCUMENT)

    @classmethod
    def read(cls, job: Job, given: str) -> "OtherReport":
        """Read the report of the run at `given`; an error says how to make it."""
        run_uri = normalize_uri(given)
        store = ObjectStore(job.cluster.readable(run_uri, run_uri))
        remedy = f"run megahour report --run {given} again"
        uri = join_uri(run_uri, REPORT_DOCUMENT)
        try:
            document, digest = read_checked(
                store, uri, lambda data: (unseal(data, remedy), sha256(data))
            )
        except ObjectNotFound as error:
            first = f"run megahour report --run {given} first"
            raise ValueError(f"{uri} is missing: {first}") from error
        return cls(store, run_uri, document, digest)


def hours_point(report: Mapping[str, Any]) -> dict[str, Any]:
    """Take from a run's report its hours of unlabelled speech, and its rates over all words.

    Raises ValueError for a report without them.
    """
    try:
        rates = report["statistics"]["pooled"]["wer"]
        shown = {
            model: {name: float(rates[model][name]) for name in ("value", "low", "high")}
            for model in (BASELINE, STUDENT)
        }
        hours = float(report["hours"][UNLABELLED])
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{report.get('run')}: its report has no intervals of {BASELINE} and {STUDENT} "
            f"({error!r}): need a run with a student, and held-out speech of several speakers"
        ) from error
    return {"run": str(report["run"]), "hours": hours, "wer": shown}


KEPT = ("run", "wer", "werr", "development", "hours", "steps", "recipe", "curves")
"""The parts of the other run's report that the comparison keeps."""


def comparison(job: Job, other: OtherReport) -> dict[str, Any]:
    """Return the other run's scores beside the tests of each model that both runs have.

    Runs of other utterances are not paired: the comparison says why.
    """
    kept = {name: other.document[name] for name in KEPT if name in other.document}
    try:
        here = utterance_errors(job.store, job.run_uri)
        there = utterance_errors(other.store, other.run_uri)
        pairs = paired(here, there)
        require_same_words(job, other)
        return kept | {"pairs": pairs}
    except ValueError as error:
        return kept | {"pairs": [], "not_paired": str(error)}


def paired(here: list[UtteranceErrors], there: list[UtteranceErrors]) -> list[dict[str, Any]]:
    """Test each model that both evaluations scored, over all words of the same speakers."""
    if not here or not there:
        raise ValueError("one of the evaluations has no utterance")
    models = [model for model in here[0].errors if model in there[0].errors]
    found = []
    for model in models:
        both = joined(of_models(there, {model: "other"}), of_models(here, {model: "this"}))
        counts = SpeakerCounts.of(both)
        if counts.errors["other"].sum():  # nothing is reduced where the other has no errors
            test = compare(resample(counts), "other", "this")
            found.append({"model": model, **test.to_json()})
    return found


def utterance_errors(store: ObjectStore, run_uri: str) -> list[UtteranceErrors]:
    """Read the word errors by utterance that a run's evaluation wrote."""
    evaluation = read_manifest(store, run_uri, EVALUATION_STEP)
    return read_errors(read_output(store, run_uri, output_of(evaluation, EVALUATION_ERRORS)))


def output_of(evaluation: Manifest, name: str, suffix: str = "") -> Output:
    """Return the evaluation's output of this name; ValueError if it has none."""
    for output in evaluation.outputs:
        file = output.key.rpartition("/")[2]
        if file.startswith(f"{name}-") and file.endswith(suffix):
            return output
    raise ValueError(f"{EVALUATION_STEP} has no {name}: run megahour evaluate in a new --run")


ORACLES = {BASELINE: ORACLE, sequence_trained(BASELINE): sequence_trained(ORACLE)}
"""The oracle's baseline, with and without sMBR, by the name that this run's report gives it."""


def recovered(job: Job, oracle: OtherReport, hours: Mapping[str, float]) -> dict[str, Any]:
    """Return the oracle's rates and what each model of this run recovers, by placement.

    `hours` are this run's by subset. ValueError for an oracle that was evaluated on other
    utterances or words.
    """
    here = utterance_errors(job.store, job.run_uri)
    there = utterance_errors(oracle.store, oracle.run_uri)
    names = {old: new for old, new in ORACLES.items() if there and old in there[0].errors}
    try:
        both = joined(here, of_models(there, names))
        require_same_words(job, oracle)
    except ValueError as error:
        raise ValueError(
            f"--oracle {oracle.run_uri}: {error}; give the oracle's run the held-out list of this "
            "run, and report it again"
        ) from error
    after = sequence_trained(BASELINE)
    return {
        "run": oracle.run_uri,
        "labelled_hours": {
            "this": hours.get(LABELLED),
            "oracle": oracle.document["hours"].get(LABELLED),
        },
        "has_same_language_model": _has_same_language_model(job, oracle),
        "lacks": after if after in here[0].errors and after not in names else "",
        "num_resamples": NUM_RESAMPLES,
        "seed": SEED,
        "level": LEVEL,
        "pooled": _scores(SpeakerCounts.of(both)),
        "by_placement": {
            name: _scores(counts) for name, counts in counts_by_placement(both).items()
        },
    }


def require_same_words(job: Job, other: OtherReport) -> None:
    """Raise ValueError for an utterance of this run whose transcript differs in the other."""
    said_there = _transcripts(other.store, other.run_uri)
    for name, words in _transcripts(job.store, job.run_uri).items():
        if (there := said_there.get(name)) != words:
            raise ValueError(f"{name} is {words!r} here and {there!r} there: need the same words")


def _transcripts(store: ObjectStore, run_uri: str) -> dict[str, str]:
    """Read the held-out transcripts that a run was scored against, by speaker and utterance."""
    evaluation = read_manifest(store, run_uri, EVALUATION_STEP)
    data = read_output(store, run_uri, output_of(evaluation, "reference", ".trn"))
    found = (line.rpartition("(") for line in data.decode().splitlines())
    return {name.removesuffix(")"): words.rstrip() for words, _, name in found}


def _has_same_language_model(job: Job, oracle: OtherReport) -> bool:
    """Return whether it is known: both name one ARPA, or the oracle's is one that this run made."""
    here, there = _given_arpa(job.store, job.run_uri), _given_arpa(oracle.store, oracle.run_uri)
    if there is None or here is not None:
        return here is not None and here == there
    made = job.store.list(join_uri(job.run_uri, GRAPH_STEP, SCRATCH_FOLDER))
    return any(each.uri.endswith(f"-{there[:16]}.arpa") for each in made)


def _given_arpa(store: ObjectStore, run_uri: str) -> str | None:
    """Return the digest of the ARPA that a run was given; None for other models."""
    return read_manifest(store, run_uri, GRAPH_STEP).inputs.get("arpa")


def _scores(counts: SpeakerCounts) -> dict[str, Any]:
    drawn = resample(counts)
    return {
        "num_speakers": len(counts.speakers),
        "reference_words": int(counts.words.sum()),
        "wer": {name: drawn.word_error_rate(name).to_json() for name in counts.errors},
        "recovery": {
            name: _recovery(drawn, name, baseline, oracle)
            for name, baseline, oracle in _stages(list(counts.errors))
        },
    }


def _stages(models: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield each model with the baseline and the oracle of its stages, where both are there."""
    after = set(map(sequence_trained, models))
    for name in models:
        change = sequence_trained if name in after else str
        baseline, oracle = change(BASELINE), change(ORACLE)
        if name not in (baseline, oracle) and {baseline, oracle} <= set(models):
            yield name, baseline, oracle


def _recovery(
    drawn: Resamples, model: str, baseline: str, oracle: str
) -> dict[str, float | None] | None:
    """Return what a model recovers; None where the oracle gains nothing."""
    if drawn.errors[baseline][0] <= drawn.errors[oracle][0]:
        return None
    return drawn.recovery(baseline, model, oracle).to_json()
