"""Check recipe, clusters and ranks before hours are spent on them.

megahour check --recipe recorded --run runs/mine --kaldi-dir /data/mine
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.cluster import Cluster, require_dependencies
from infra.configuration import ConfigurationError
from infra.ranges import AUTO, Range, mebibytes, printable
from infra.store.object_store import ObjectNotFound, StoreError, join_uri
from infra.store.uris import require_within, resolve_prefix
from jobs.cli.begun import require_base
from jobs.cli.catalogue import CHECK, EVALUATE, SELECT_UTTERANCES, STEPS
from jobs.cli.command_line import fail
from jobs.cli.device_choice import choose_device, gpus_for
from jobs.cli.job import Job, job_parser, open_job, written_steps
from jobs.cli.parser import add_device_argument, add_extends_argument, add_ranks_arguments
from jobs.ingestion.kaldi_directory import LANGUAGE_DATA
from pipeline.runs.manifest import manifest_uri
from pipeline.runs.names import (
    ALIGNER,
    BASELINE,
    LANGUAGE_MODEL_SETTINGS,
    LEXICON_FILE,
    METADATA_FOLDER,
    STUDENT,
    TEACHER,
)
from pipeline.steps.utterance_features import resolve_audio
from training.configuration.models import FactoryConfig
from training.configuration.targets import OwnTeacherConfig
from training.decoding.language_model.arpa import RestrictedArpa, read_arpa
from training.decoding.lexicon import Lexicon, parse_lexicon
from training.evaluation.language_model import LanguageModelFile, TextSentences
from training.models.parameter_count import num_parameters
from training.recipes import Recipe, check_phones, check_ranks

RANKS = Range(1, 1024)
"""The ranks that one host may start."""


def main() -> None:
    """Parse the command line and check; exit with 0 or 2."""
    arguments = _parser().parse_args()
    try:
        checked = check(arguments)
    except (ConfigurationError, StoreError) as error:
        sys.exit(fail(CHECK, error, 2))
    for note in checked.notes:
        print(f"{CHECK}: {note}", file=sys.stderr)
    if not arguments.quiet:
        job, ranks = checked.job, _ranks(arguments)
        found = {"recipe": job.recipe.name, "run": job.run_uri, "ranks": ranks}
        print(json.dumps(found) if arguments.json else f"check: {job.recipe.name}: all is well")
    sys.exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = job_parser(
        CHECK,
        "Check what a run would take hours to find out: the range of every value in the recipe and "
        "the cluster files, ranks against groups and GPUs, senones against phones and k, executors "
        "against instances, the files of evaluation's language model against the lexicon, and the "
        "installed versions. A model of your own is made and tried on a small minibatch: shapes, "
        "gradients, determinism, padding, look-ahead. A teacher of your own is imported, and its "
        "settings are compared with its signature. Nothing is written.",
        "0 all is well, 2 something is not.",
    )
    add = parser.add_argument
    add("--kaldi-dir", help="Kaldi data directory, whose lexicon.txt names the phones")
    text = "the corpus must be there already, as when nothing is ingested"
    add("--ingested", action="store_true", help=text)
    add_extends_argument(parser)
    add_ranks_arguments(parser)
    add_device_argument(parser)
    add("--quiet", action="store_true", help="print nothing if all is well")
    return parser


@dataclass(frozen=True, slots=True)
class Checked:
    """Checked is the first step's job, and what the user may want to change though it works."""

    job: Job
    notes: Sequence[str]


def check(arguments: argparse.Namespace) -> Checked:
    """Open every step as it will open itself; ConfigurationError names what cannot be done."""
    ranks = _ranks(arguments)
    by_step = {step: open_job(step, arguments) for step in STEPS}
    jobs = list(by_step.values())
    for section, num_ranks in ranks.items():
        check_ranks(jobs[0].recipe, section, num_ranks)
        choose_device(arguments.device, 0, num_ranks, gpus_for(arguments.device))
        if section in jobs[0].recipe.sequence_training.models:
            check_ranks(jobs[0].recipe, "sequence_training", num_ranks)
    for job in jobs:
        for name in written_steps(job.recipe, job.name):
            prefixes = map(resolve_prefix, job.cluster.writable(job.run_uri, job.corpus_uri))
            require_within(manifest_uri(job.run_uri, name), list(prefixes))
        require_dependencies(job.cluster)
        if job.cluster.is_local:
            _check_host(job.cluster)
    _check_factories(jobs[0].recipe, ranks)
    _check_own_teacher(jobs[0].recipe)
    _check_models(jobs[0].recipe, ranks)
    if arguments.ingested:
        _require_corpus(by_step[SELECT_UTTERANCES])
    require_base(jobs)
    directory = Path(arguments.kaldi_dir) if arguments.kaldi_dir else None
    lexicon = _lexicon(by_step[EVALUATE], directory)
    if directory is not None and lexicon is not None:
        check_phones(jobs[0].recipe, len(lexicon.phones))
    return Checked(jobs[0], tuple(_language_model_notes(by_step[EVALUATE], directory, lexicon)))


def _ranks(arguments: argparse.Namespace) -> Mapping[str, int]:
    for name in ("supervised_ranks", "student_ranks"):
        if not RANKS.admits(number := getattr(arguments, name)):
            option = name.replace("_", "-")
            raise ConfigurationError(f"--{option} {printable(str(number))}: need {RANKS.need}")
    supervised = arguments.supervised_ranks
    trained = {BASELINE: supervised, TEACHER: supervised, STUDENT: arguments.student_ranks}
    return {ALIGNER: 1, **trained}


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


def _check_factories(recipe: Recipe, sections: Iterable[str]) -> None:
    """Raise ConfigurationError if a model of the user's own is not as the others take it."""
    tried = set()
    for section in sections:
        form, precision = recipe.models.of(section), getattr(recipe, section).precision
        if isinstance(form, FactoryConfig) and (form, precision) not in tried:
            from training.models.contract import check_contract  # noqa: PLC0415 - imports torch

            tried.add((form, precision))
            try:
                check_contract(form, recipe.senones.max_senones, precision)
            except ConfigurationError as error:
                raise ConfigurationError(f"models: {section}: {error}") from error


def _check_own_teacher(recipe: Recipe) -> None:
    """Raise ConfigurationError if a teacher of the user's own cannot be made as the recipe says."""
    if isinstance(own := recipe.targets.teacher, OwnTeacherConfig):
        from training.targets.own_teacher import check_untrained  # noqa: PLC0415 - imports torch

        try:
            check_untrained(own)
        except ConfigurationError as error:
            raise ConfigurationError(f"targets: teacher: {error}") from error


def _host_mebibytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20


def _require_corpus(job: Job) -> None:
    """Raise ConfigurationError if there is no metadata yet."""
    uri = join_uri(job.corpus_uri, METADATA_FOLDER)
    if not job.store.list(uri):
        remedy = "name what to ingest by --kaldi-dir or --manifest, or set corpus.uri"
        raise ConfigurationError(f"{uri} holds no metadata: {remedy}")


def _lexicon(job: Job, directory: Path | None) -> Lexicon | None:
    """Read the lexicon of the Kaldi directory, or of the corpus; None before there is a corpus."""
    if directory is not None and not directory.is_dir():
        where = printable(str(directory))
        raise ConfigurationError(f"--kaldi-dir {where} is not a directory: correct the path")
    uri = str(directory / LEXICON_FILE) if directory else join_uri(job.corpus_uri, LEXICON_FILE)
    try:
        data = (directory / LEXICON_FILE).read_bytes() if directory else job.store.get(uri)
        return parse_lexicon(data.decode())
    except ObjectNotFound:
        return None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or no lexicon
        raise ConfigurationError(f"{uri}: {error}") from error


def _language_model_notes(
    job: Job, directory: Path | None, lexicon: Lexicon | None
) -> Iterator[str]:
    """Read the files that evaluation names, and yield what hypotheses will lack by them.

    Raises ConfigurationError for a file that evaluation could not use, hours later.
    """
    for setting in LANGUAGE_MODEL_SETTINGS:
        name: str = getattr(job.recipe.evaluation, setting)
        is_ingested = resolve_audio(job.corpus_uri, name) != name
        if not name or (is_ingested and lexicon is None):
            continue
        where = f"evaluation.{setting} = {printable(name)!r}"
        try:
            note = _language_model_note(
                setting, _language_model_file(job, name, directory), lexicon
            )
        except (OSError, StoreError, ValueError) as error:
            raise ConfigurationError(f"{where}: {error}") from error
        if note:
            yield f"{where}: {note}"


def _language_model_file(job: Job, name: str, directory: Path | None) -> LanguageModelFile:
    """Read a file where it is now: in the directory that ingest will copy, or in the store."""
    if directory is None or name not in LANGUAGE_DATA:
        return LanguageModelFile.read(job.store, job.corpus_uri, name)
    if not (directory / name).is_file():
        raise ValueError(f"{directory / name} is no file: put it there, or name the URI of another")
    return LanguageModelFile.at(directory / name)


def _language_model_note(setting: str, file: LanguageModelFile, lexicon: Lexicon | None) -> str:
    """Say which words no hypothesis will have; without a lexicon, only read the file."""
    words = lexicon.pronunciations.keys() if lexicon else ()
    if setting == "arpa":
        arpa = file.arpa(words) if lexicon else read_arpa(file.text())
        missing = arpa.num_missing_words if isinstance(arpa, RestrictedArpa) else 0
        said = f"{missing} of the {len(words)} words of {LEXICON_FILE} are not in it"
    else:
        text = file.sentences(words) if lexicon else file.text()
        missing = text.num_unknown if isinstance(text, TextSentences) else 0
        said = f"{missing} of its words are not in {LEXICON_FILE}"
    return f"{said}, and will be in no hypothesis" if missing else ""


if __name__ == "__main__":
    main()
