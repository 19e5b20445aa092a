"""Check recipe, clusters and ranks before hours are spent on them.

megahour check --recipe recorded --run runs/mine --kaldi-dir /data/mine
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from infra.cluster import (
    INSTANCE_TYPES,
    Cluster,
    load_cluster,
    require_dependencies,
    shipped_clusters,
)
from infra.extras import how_to_install, lacking
from infra.settings import AUTO, ConfigurationError, mebibytes, printable
from infra.spark.host_environment import find_java_home, require_environment
from infra.store.object_store import AccessDenied, StoreError, join_uri
from infra.store.uris import require_within, resolve_audio
from jobs.cli.arguments import (
    LANGUAGE_MODEL,
    ON_CPU,
    add_base_arguments,
    add_device_argument,
    add_ranks_arguments,
    add_source_arguments,
    names_labelled_alone,
    require_source_options,
    subset_and_uri,
)
from jobs.cli.command_line import fail
from jobs.cli.host import choose_device, gpus_for
from jobs.cli.job import Job, job_of, job_parser, recipe_of, require_base, require_prefixes
from jobs.cli.megahour import CHECK
from jobs.lexicon_sources import (
    has_new_lexicon,
    new_lexicon_bytes,
    phone_notes,
    read_language_model,
    read_lexicon,
    require_replaceable,
    stored_name,
)
from jobs.planning.calibration import TWO_CORES, read_calibration
from jobs.planning.run_plan import (
    LABELLED_SHARE,
    StepPlan,
    plan_run,
    planned_workload,
    run_workload,
)
from jobs.run_table import (
    BOOTSTRAP,
    BUILD_GRAPH,
    EVALUATE,
    GENERATE_TARGETS,
    INGEST,
    SELECT_UTTERANCES,
    STEPS,
)
from pipeline.runs.engine import LossBudgetExceededError
from pipeline.runs.names import (
    ALIGNER,
    BASELINE,
    DEV,
    HELDOUT,
    LABELLED,
    LANGUAGE_MODEL_FILES,
    LANGUAGE_MODEL_SETTINGS,
    LEXICON_FILE,
    METADATA_FOLDER,
    STORE_CHECK_FOLDER,
    STUDENT,
    TEACHER,
    UNLABELLED,
)
from pipeline.steps.ingestion import TRANSCRIPTS
from training.decode.lexicon import Lexicon
from training.evaluate.language_model import MAX_TEXT_BYTES, LanguageModelFile, num_unknown
from training.models.parameter_count import num_parameters
from training.settings.decoding import OwnTeacherConfig
from training.settings.model_training import Precision
from training.settings.models import FactoryConfig
from training.settings.recipe import Recipe, check_phones, check_ranks

MOST_DAYS = 30
"""A plan of more days, of all steps one after the other, is worth a note."""


def main() -> None:
    """Parse the command line and check; exit with 0 or 2."""
    arguments = _parser().parse_args()
    try:
        job, notes = check(arguments)
    except (LossBudgetExceededError, OSError, StoreError, ValueError) as error:
        sys.exit(fail(CHECK, error, 2))
    for note in notes:
        print(f"{CHECK}: {note}", file=sys.stderr)
    if not arguments.quiet:
        found = {"recipe": job.recipe.name, "run": job.run_uri, "ranks": _ranks(arguments)}
        print(json.dumps(found) if arguments.json else f"check: {job.recipe.name}: all is well")
    sys.exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = job_parser(
        CHECK,
        "Check what a run would take hours to find out: the range of every value in the recipe and "
        "the cluster files, ranks against groups and GPUs, senones against phones and k, executors "
        "against instances, the files of evaluation's language model against the lexicon, whether "
        "there is a lexicon for the manifests' transcripts, and the installed versions. By the "
        f"calibration that comes with the package, it warns of a plan of more than {MOST_DAYS} "
        "days, and of models that work for days on a cluster without GPUs. A model of your own is "
        "made and tried on a small minibatch: shapes, gradients, determinism, padding, look-ahead. "
        "A teacher of your own is imported, and its settings are compared with its signature. A "
        "run in S3 gets eleven small objects, which show whether one of several conditional writes "
        "wins and listings are in the order of keys; nothing else is written.",
        "0 all is well, 2 something is not.",
    )
    add = parser.add_argument
    add_source_arguments(parser, required=False)
    text = "the corpus must be there already, as when nothing is ingested"
    add("--ingested", action="store_true", help=text)
    add_base_arguments(parser)
    add_ranks_arguments(parser)
    add_device_argument(parser)
    add("--quiet", action="store_true", help="print nothing if all is well")
    return parser


def check(arguments: argparse.Namespace) -> tuple[Job, Sequence[str]]:
    """Open every step as it will open itself; ValueError names what cannot be done.

    Return the first step's job, and what the user may want to change though it works.
    """
    require_source_options(arguments)
    ranks = _ranks(arguments)
    recipe = recipe_of(CHECK, arguments)
    by_step = {step: job_of(step, recipe, arguments) for step in STEPS}
    jobs = list(by_step.values())
    for section, num_ranks in ranks.items():
        check_ranks(getattr(recipe, section), section, num_ranks, num_ranks)
        if section in recipe.sequence_training.models:
            check_ranks(recipe.sequence_training, "sequence_training", num_ranks, num_ranks)
    notes = list(_host_notes(jobs, arguments.device, ranks.values()))
    _check_factories(recipe, ranks, by_step[GENERATE_TARGETS].cluster)
    _check_own_teacher(recipe)
    _check_transcripts(recipe, arguments)
    _check_models(recipe, ranks)
    if arguments.ingested:
        reader = by_step[SELECT_UTTERANCES]
        if not reader.store.list(metadata := join_uri(reader.corpus_uri, METADATA_FOLDER)):
            remedy = "name what to ingest by --kaldi-dir or --manifest, or set corpus.uri"
            raise ConfigurationError(f"{metadata} holds no metadata: {remedy}")
    require_base(jobs, new_lexicon_bytes(by_step[INGEST]))
    notes += _language_notes(by_step, arguments)
    notes += _plan_notes(by_step, arguments.device)
    try:
        jobs[0].store.check(join_uri(jobs[0].run_uri, STORE_CHECK_FOLDER))
    except AccessDenied as error:
        notes.append(f"the store was not tried, as each step will do: {error}")
    return jobs[0], notes


def _language_notes(by_step: Mapping[str, Job], arguments: argparse.Namespace) -> list[str]:
    """Check lexicon, manifests and language models; return what ingest and decoding will say."""
    recipe = by_step[EVALUATE].recipe
    lexicon = read_lexicon(by_step[EVALUATE])
    if arguments.manifest:
        from jobs.ingest_sources import require_usable_manifests  # noqa: PLC0415 - imports NumPy

        require_usable_manifests(by_step[INGEST])
    if arguments.transcripts:
        from jobs.ingest_sources import transcripts_of  # noqa: PLC0415 - imports NumPy

        for recognizer in transcripts_of(by_step[INGEST]):
            recognizer.require_usable()
    if lexicon is None and (arguments.manifest or arguments.ingested):
        _require_lexicon(by_step[SELECT_UTTERANCES], arguments)
    if lexicon is not None and has_new_lexicon(arguments):
        check_phones(recipe, len(lexicon.phones))
    reading = [BUILD_GRAPH, *([BOOTSTRAP] if recipe.corpus.num_text_words else [])]
    notes = list(_language_model_notes([by_step[step] for step in reading], lexicon))
    if lexicon is not None:
        # What ingest will say, or refuse.
        if (data := new_lexicon_bytes(by_step[INGEST])) is not None:
            require_replaceable(by_step[INGEST], data)
            notes += phone_notes(data)
        if arguments.manifest or arguments.kaldi_dir:
            from jobs.ingest_sources import vocabulary_notes  # noqa: PLC0415 - imports NumPy

            notes += vocabulary_notes(by_step[INGEST], lexicon)
    return notes


def _language_model_notes(readers: Sequence[Job], lexicon: Lexicon | None) -> Iterator[str]:
    """Read the files that evaluation names, and yield what hypotheses will lack by them.

    Raises ConfigurationError for a file that one of the `readers` could not use, hours later, and
    for a language model that no setting of the recipe names.
    """
    job = readers[0]
    evaluation, given = job.recipe.evaluation, job.arguments.language_model
    if given and stored_name(given) not in (evaluation.arpa, evaluation.language_model_text):
        setting = "arpa" if ".arpa" in stored_name(given) else "language_model_text"
        raise ConfigurationError(
            f"{LANGUAGE_MODEL} {printable(given)}: the recipe does not use "
            f"it: set evaluation.{setting} = {stored_name(given)!r}"
        )
    for setting in LANGUAGE_MODEL_SETTINGS:
        name: str = getattr(evaluation, setting)
        if not name:
            continue
        where = f"evaluation.{setting} = {printable(name)!r}"
        uri = resolve_audio(job.corpus_uri, name)
        try:
            for each in readers:
                require_within(uri, each.store.allowed_prefixes)
            if uri != name and lexicon is None:  # ingested, and there is no corpus yet
                continue
            file = _language_model_file(job, name)
            note = _missing_words(setting, file, lexicon, job.recipe.corpus.num_text_words)
        except (OSError, StoreError, ValueError) as error:
            raise ConfigurationError(f"{where}: {error}") from error
        if note:
            yield f"{where}: {note}"


def _language_model_file(job: Job, name: str) -> LanguageModelFile:
    """Read a file where it is now: where ingest will take it from, or in the store."""
    arguments = job.arguments
    if name not in LANGUAGE_MODEL_FILES:
        return LanguageModelFile.read(job.store, job.corpus_uri, name)
    if arguments.kaldi_dir:
        path = Path(arguments.kaldi_dir) / name
        if not path.is_file():
            raise ValueError(f"{path} is no file: put it there, or name the URI of another")
        return LanguageModelFile.at(path)
    if arguments.language_model:
        return read_language_model(arguments.language_model)
    uri = join_uri(job.corpus_uri, name)
    if arguments.manifest and not job.store.exists(uri):
        raise ValueError(f"{uri} is absent: give {LANGUAGE_MODEL} URI")
    return LanguageModelFile.read(job.store, job.corpus_uri, name)


def _missing_words(
    setting: str, file: LanguageModelFile, lexicon: Lexicon | None, num_spelled: int
) -> str:
    """Say which words no hypothesis will have; without a lexicon, only read the file.

    Letters pronounce `num_spelled` words of a text, its most frequent ones.
    """
    if lexicon is None:
        if setting == "arpa":
            file.arpa()
        else:
            file.require_text(MAX_TEXT_BYTES)
        return ""
    words = lexicon.pronunciations.keys()
    if setting == "arpa":
        missing = file.restricted_arpa(words).num_missing_words
        said = f"{missing} of the {len(words)} words of {LEXICON_FILE} are not in it"
    else:
        spelled = file.spellable_words(words, num_spelled) if num_spelled else {}
        missing = num_unknown(file.sentences(words)) - sum(spelled.values())
        nor = f" or among the {len(spelled)} that letters pronounce" if spelled else ""
        said = f"{missing} of its words are not in {LEXICON_FILE}{nor}"
    return f"{said}, and will be in no hypothesis" if missing else ""


def _ranks(arguments: argparse.Namespace) -> Mapping[str, int]:
    supervised = arguments.supervised_ranks
    return {
        **dict.fromkeys((ALIGNER, BASELINE, TEACHER), supervised),
        STUDENT: arguments.student_ranks,
    }


def _host_notes(jobs: Sequence[Job], device: str, ranks: Iterable[int]) -> Iterator[str]:
    """Check what the steps need of this host, and yield which of them lack an extra here."""
    missing = lacking(extra for job in jobs for extra in STEPS[job.name].extras)
    startable = [job for job in jobs if not {*STEPS[job.name].extras} & {*missing}]
    if others := [job.name for job in jobs if job not in startable]:
        yield f"cannot start here: {', '.join(others)}: {how_to_install(missing)}"
    if "train" not in missing:
        gpus = gpus_for(device)
        for num_ranks in ranks:
            choose_device(device, 0, num_ranks, gpus)
        yield from _precision_notes(jobs, choose_device(device, 0, 1, gpus))
    for job in startable:
        if STEPS[job.name].is_on_spark:
            require_environment(job.cluster)
        require_dependencies(job.cluster)
        if job.cluster.is_local:
            _check_host(job.cluster)
    if any(STEPS[job.name].is_on_spark and job.cluster.is_local for job in startable):
        find_java_home()


def _precision_notes(jobs: Sequence[Job], device: str) -> Iterator[str]:
    """Yield which models a device of this host trains in float32, for want of bfloat16."""
    here = [STEPS[job.name].trains for job in jobs if job.cluster.is_local]
    recipe = jobs[0].recipe
    asking = [each for each in here if each and getattr(recipe, each).precision == "bfloat16"]
    if asking:
        import torch  # noqa: PLC0415 - 2 s

        from training.models.precision import has_bfloat16  # noqa: PLC0415 - imports torch

        if not has_bfloat16(torch.device(device)):
            said = f"{', '.join(asking)}: precision = 'bfloat16'"
            yield f"{said}: trained in float32, as {device} does not multiply bfloat16 here"


def _plan_notes(by_step: Mapping[str, Job], device: str) -> Iterator[str]:
    """Plan the run by the package's calibration; yield where it takes very long, and the remedy.

    A corpus that is not ingested yet is planned by the hours that the recipe selects, if it says.
    """
    reader = by_step[SELECT_UTTERANCES]
    recipe, hours = reader.recipe, reader.recipe.selection.hours
    try:
        workload = run_workload(reader.store, reader.run_uri, hours)
    except AccessDenied:  # the trial of the store says so
        workload = None
    if workload is None and hours:
        workload = planned_workload(hours, LABELLED_SHARE * hours)
    if workload is None:
        return
    calibration = read_calibration(TWO_CORES)
    steps = plan_run(workload, recipe, calibration, lambda step: by_step[step].cluster).steps
    planned = f"planned for {workload.hours(UNLABELLED):,.0f} hours by the calibration {TWO_CORES}"
    for plan in steps:
        job = by_step[plan.step]
        if plan.device_seconds and plan.wall_seconds > 86_400 and not _has_gpus(job, device):
            fitting = [name for name in shipped_clusters() if _fits(load_cluster(name), job)]
            fitting.sort(key=lambda name: name != job.name)
            such = f", such as {fitting[0]}" if fitting else ""
            yield (
                f"{plan.step} takes {_days(plan)} without GPUs, {planned}: give it a cluster with "
                f"GPUs by --step-cluster {plan.step}=FILE{such}"
            )
    if (days := sum(plan.wall_seconds for plan in steps) / 86_400) > MOST_DAYS:
        longest = max(steps, key=lambda plan: plan.wall_seconds)
        yield (
            f"all steps take {days:,.0f} days, {planned}; the longest is {longest.step}, "
            f"{_days(longest)}: give it more or faster instances by --step-cluster "
            f"{longest.step}=FILE"
        )


def _days(plan: StepPlan) -> str:
    days = plan.wall_seconds / 86_400
    return f"{days:,.1f} days on {plan.instances} x {plan.instance_type}"


def _has_gpus(job: Job, device: str) -> bool:
    """Return whether a step's models run on GPUs: those of its cluster, or of this host."""
    if job.cluster.is_local and not lacking(["train"]) and gpus_for(device).count:
        return True
    # Ranks of torchrun take an instance's GPUs, tasks of Spark those that the file names.
    is_on_spark = STEPS[job.name].is_on_spark
    return job.cluster.has_gpus if is_on_spark else job.cluster.gpus_per_instance > 0


def _fits(cluster: Cluster, job: Job) -> bool:
    """Return whether a step could take a cluster instead of its own for the sake of its GPUs."""
    try:
        require_prefixes(job.name, job.recipe, cluster, job.run_uri)
    except ConfigurationError:
        return False
    return _has_gpus(replace(job, cluster=cluster), ON_CPU)


def _check_host(cluster: Cluster) -> None:
    """Raise ConfigurationError if this host has not the memory or a device of a local cluster."""
    if mebibytes(cluster.driver_memory) > (has := _host_mebibytes()):
        raise ConfigurationError(
            f"driver_memory = {cluster.driver_memory!r}: need at most {has}m, the memory of this "
            "host, on which a local master runs"
        )
    places = {each.partition("#")[0]: each for each in cluster.devices if cluster.devices != AUTO}
    # Counting GPUs imports torch where there may be one.
    num_gpus = gpus_for(AUTO).count if places.keys() - {"cpu"} else 0
    present = [f"cuda:{number}" for number in range(num_gpus)]
    for place, device in places.items():
        if place not in ("cpu", *present, *(["cuda"] if present else [])):
            remedy = f"need cpu, or one of {', '.join(present)}" if present else "need cpu"
            raise ConfigurationError(f"devices: {device!r} is not on this host: {remedy}")


def _check_models(recipe: Recipe, ranks: Mapping[str, int]) -> None:
    """Raise ConfigurationError if this host cannot hold what its ranks train, at the least."""
    for section, num_ranks in ranks.items():
        size = num_parameters(recipe.models.of(section), recipe.senones.max_senones)
        config = getattr(recipe, section)
        # Weights, gradients, and what optimizer and trainer keep, as float32.
        num_vectors = 2 + config.optimizer.num_state_vectors + config.trainer.num_state_vectors
        num_copies = num_ranks // getattr(config, "model_parallel_ranks", 1)
        needed = num_copies * num_vectors * 4 * size >> 20
        if needed > (has := _host_mebibytes()):
            raise ConfigurationError(
                f"{section}: a model of {size} parameters needs {needed} MB on {num_ranks} ranks: "
                f"need at most {has} MB, the memory of this host: name a smaller model in models"
            )


def _check_factories(recipe: Recipe, sections: Iterable[str], labelling: Cluster) -> None:
    """Raise ConfigurationError if a model of the user's own is not as the others take it."""
    tried = set()
    for section in sections:
        if not isinstance(form := recipe.models.of(section), FactoryConfig):
            continue
        from training.models.contract import check_contract  # noqa: PLC0415 - imports torch

        for precision in _precisions(recipe, section, labelling):
            if (form, precision) in tried:
                continue
            tried.add((form, precision))
            try:
                check_contract(form, recipe.senones.max_senones, precision)
            except ConfigurationError as error:
                raise ConfigurationError(f"models: {section}: {error}") from error


def _precisions(recipe: Recipe, section: str, labelling: Cluster) -> list[Precision]:
    """Return the formats that a section's model computes in: training's, sMBR's and labelling's."""
    found: set[Precision] = {getattr(recipe, section).precision}
    if section in recipe.sequence_training.models:
        found.add(recipe.sequence_training.precision)
    if section == TEACHER and recipe.targets.rounds > 1:
        found.add(recipe.student.precision)
    if section == TEACHER and _labels_in_bfloat16(labelling):
        found.add("bfloat16")
    return sorted(found)


def _labels_in_bfloat16(cluster: Cluster) -> bool:
    """Return whether the GPUs that a cluster labels on are known to multiply bfloat16."""
    if not cluster.is_local:
        instance = INSTANCE_TYPES.get(cluster.instance_type)
        return instance is not None and cluster.has_gpus and instance.has_bfloat16
    import torch  # noqa: PLC0415 - 2 s

    from training.models.precision import fastest_precision  # noqa: PLC0415 - imports torch

    has_gpus = cluster.has_gpus or (cluster.devices == AUTO and gpus_for(AUTO).count > 0)
    return has_gpus and fastest_precision(torch.device("cuda")) == "bfloat16"


def _check_own_teacher(recipe: Recipe) -> None:
    """Raise ConfigurationError if a teacher of the user's own cannot be made as the recipe says."""
    if isinstance(own := recipe.targets.teacher, OwnTeacherConfig):
        from training.targets.own_teacher import check_untrained  # noqa: PLC0415 - imports torch

        try:
            check_untrained(own)
        except ConfigurationError as error:
            raise ConfigurationError(f"targets: teacher: {error}") from error


def _check_transcripts(recipe: Recipe, arguments: argparse.Namespace) -> None:
    """Raise ConfigurationError if there will be no transcripts, or none that can be read."""
    if recipe.targets.source == "transcripts":
        is_spoken = arguments.kaldi_dir and not names_labelled_alone(arguments)
        if is_spoken and not arguments.transcripts:
            remedy = f"give {TRANSCRIPTS} NAME=URI, or set targets.source = 'lattice'"
            raise ConfigurationError(f"targets.source = 'transcripts': there are none: {remedy}")
        from training.targets.text_normalization import check_language  # noqa: PLC0415 - NumPy

        check_language(recipe.targets.transcripts.language)


def _host_mebibytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20


def _require_lexicon(job: Job, arguments: argparse.Namespace) -> None:
    """Raise ConfigurationError if there are transcripts, or will be, and no lexicon."""
    uri = join_uri(job.corpus_uri, LEXICON_FILE)
    subsets = {subset_and_uri(each)[0] for each in arguments.manifest or ()}
    labelled = join_uri(job.corpus_uri, METADATA_FOLDER, LABELLED)
    if not subsets & {LABELLED, HELDOUT, DEV} and not job.store.list(labelled):
        return
    remedy = "give --lexicon URI" if arguments.manifest else "put Kaldi's lexicon.txt there"
    raise ConfigurationError(f"{uri} is absent, and transcripts are aligned by it: {remedy}")


if __name__ == "__main__":
    main()
