"""Define the command-line arguments that several commands share, and pass them on to steps.

Error messages show no password. This module imports neither NumPy nor Spark nor torch, so that
`--help` is quick.
"""

import argparse
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import NoReturn

from infra.cluster import Cluster, load_cluster
from infra.extras import how_to_install
from infra.log_lines import LOG_FORMATS, log_format
from infra.settings import (
    AUTO,
    MAX_FILE_BYTES,
    ConfigurationError,
    Range,
    Readable,
    holds_password,
    printable,
)
from infra.store.uris import is_s3, normalize_uri
from jobs.run_table import STEPS
from pipeline.records import require_recognizer
from pipeline.runs.names import ALL_SUBSETS, DEV, EXTENDS, LABELLED, LABELLED_FROM, UNLABELLED
from pipeline.steps.ingestion import COLUMNS, FORMATS, IGNORE_COLUMNS, RECORDINGS, TRANSCRIPTS

DEV_SHARES = Range(0.001, 0.5, zero="none")
"""The shares of the labelled speakers that may become development speakers."""

CLUSTER_OPTIONS = "--cluster", "--step-cluster"

KALDI_DIR, MANIFEST, DEV_SHARE, LOCALE = "--kaldi-dir", "--manifest", "--dev-share", "--locale"
UNLABELLED_SPEAKERS = f"{UNLABELLED}.speakers"
LEXICON, LANGUAGE_MODEL = "--lexicon", "--language-model"

MANIFEST_OPTIONS = (
    *("--format", RECORDINGS, COLUMNS, IGNORE_COLUMNS, "--speaker-buckets"),
    *(LOCALE, LEXICON, LANGUAGE_MODEL, TRANSCRIPTS),
)
"""The options that say what is in manifests, and what lies beside them."""

TRAINING_PLACEMENTS, HELDOUT_PLACEMENTS = "--placements", "--heldout-placements"
PLACEMENT_SEED = "--placement-seed"

SOURCE_OPTIONS = (KALDI_DIR, MANIFEST, *MANIFEST_OPTIONS)
"""The options that name what is ingested."""

PLACEMENT_OPTIONS = (TRAINING_PLACEMENTS, HELDOUT_PLACEMENTS, PLACEMENT_SEED)

INGEST_OPTIONS = (*SOURCE_OPTIONS, *PLACEMENT_OPTIONS, DEV_SHARE)
"""The options of a run that ingest receives."""

DEFAULT_SPEAKER_BUCKETS = 16

RANKS = Range(1, 1024)
"""The ranks that one host may start."""

ON_CPU = "cpu"
DEVICE = re.compile(rf"{AUTO}|{ON_CPU}|cuda(:(?P<number>[0-9]{{1,4}}))?")
"""The values of --device."""

RECIPES = files("jobs") / "recipes"  # the code may lie in a zip


class Parser(argparse.ArgumentParser):
    """Parser is argparse's; what it complains of is one line, and its passwords are stars."""

    def error(self, message: str) -> NoReturn:
        """Print usage and message; exit with 2."""
        super().error(printable(message))


def add_recipe_arguments(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add --recipe, required unless it has a default, and --set."""
    ours = ", ".join(sorted(each.name.removesuffix(".toml") for each in RECIPES.iterdir()))
    parser.add_argument(
        "--recipe",
        required=default is None,
        default=default,
        help="TOML file, also in S3, or a name in jobs/recipes: "
        + (f"default {default}" if default else ours),
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="replace one value of the recipe; repeat it for more",
    )
    # Training steps name the trainer of their section here.
    parser.set_defaults(trainers={})


def add_log_argument(parser: argparse.ArgumentParser) -> None:
    """Add the format of the lines on standard error; steps that a run starts have its own."""
    parser.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default=log_format(),
        help="lines on standard error: text with time and step, or one JSON object a line",
    )


def number_in(bounds: Range, kind: type[int] | type[float] = float) -> Callable[[str], float]:
    """Return a function by which argparse reads a number of this kind within these bounds."""

    def read(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        if not bounds.admits(number):
            raise argparse.ArgumentTypeError(f"{printable(text)}: need {bounds.need}")
        return number

    return read


def add_ranks_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that decide on how many ranks a run trains."""
    for option, models, default in (
        ("--supervised-ranks", "the aligner, the baseline and the teacher", 2),
        ("--student-ranks", "the student", 4),
    ):
        text = f"processes that train {models}, default {default}"
        one = number_in(RANKS, int)
        parser.add_argument(option, type=one, default=default, metavar="N", help=text)


def add_source_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the arguments that name what is ingested: a directory to copy, or manifests."""
    source = parser.add_mutually_exclusive_group(required=required)
    source.add_argument(
        KALDI_DIR,
        metavar="DIR",
        help="Kaldi data directory to copy, with labelled.speakers, heldout.speakers, and if you "
        "have some unlabelled.speakers and dev.speakers",
    )
    add_manifest_arguments(parser, source)


def add_manifest_arguments(
    parser: argparse.ArgumentParser, source: argparse._ActionsContainer | None = None
) -> None:
    """Add the arguments that name manifests, what is in them, and what lies beside them."""
    (source or parser).add_argument(
        MANIFEST,
        action="append",
        metavar="[SUBSET=]URI",
        help="object or folder that lists audio, which stays where it is; repeat it for more "
        "subsets: labelled, unlabelled (the default), heldout, dev",
    )
    parser.add_argument(
        "--format",
        choices=tuple(FORMATS),
        help="format of all manifests: nemo is JSON lines of audio_filepath, duration, text and "
        "offset; lhotse is cuts, or supervisions with --recordings; shar, kaldi and librispeech "
        "are folders; common_voice is a .tsv beside clips/; table is JSON lines, CSV or Parquet, "
        "see --columns; default nemo",
    )
    add = parser.add_argument
    add(
        RECORDINGS,
        metavar="URI",
        help="lhotse's recordings, for --format lhotse with supervisions in place of cuts",
    )
    add(
        COLUMNS,
        metavar="FIELD=COLUMN,...",
        default="",
        help="for --format table: the columns of fields that have another name there, such as "
        "audio_uri=path,speaker_id=client",
    )
    add(
        IGNORE_COLUMNS,
        metavar="COLUMN,...",
        default="",
        help="columns of tables, keys of JSON, or tables of a Kaldi directory, to pass over; "
        "others that are neither used nor known to be harmless are refused",
    )
    add(LEXICON, metavar="URI", help="Kaldi's lexicon.txt, to align and decode with")
    add(
        LANGUAGE_MODEL,
        metavar="URI",
        help="a language model of your own beside manifests: .arpa, or .txt with a sentence a "
        "line, or either in .gz; the corpus has it as language_model.arpa, and so on, which the "
        "recipe's evaluation.arpa or evaluation.language_model_text must name",
    )
    add(
        TRANSCRIPTS,
        action="append",
        default=[],
        metavar="NAME=URI",
        help="JSON lines of what a recognizer heard, and your name for it, for targets.source = "
        "'transcripts'. A line has pred_text and maybe score, and names the utterance: by "
        "utterance_id, by the path of the audio, or by path and offset. A file called text, or "
        "*.txt, has Kaldi's form: the id and the words. Repeat it for more "
        "recognizers. With manifests the whole file is read again for each 20,000 utterances: "
        "where it has gigabytes, give pred_text in the manifest",
    )
    add(LOCALE, help="the locale of rows, or of a directory's speakers, without one; or und")
    add(
        "--speaker-buckets",
        type=number_in(Range(1, 100_000), int),
        metavar="N",
        help="speaker buckets of the metadata, each read by one task of a selection; default "
        f"{DEFAULT_SPEAKER_BUCKETS}; take about one for each million utterances",
    )


def add_placement_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that decide in which placements ingest simulates utterances."""
    parser.add_argument(
        TRAINING_PLACEMENTS,
        metavar="NAMES|N|N:NAMES",
        help="simulate each utterance in these placements, such as clean,DP1,DP3 (clean is the "
        "audio as it is), in N of DP1 to DP5, or in N of these, such as 2:clean,DP1,DP3, drawn for "
        "each utterance; default: the audio alone. Of manifests, clean audio stays where it is. "
        f"Needs {how_to_install(['demo'])}",
    )
    parser.add_argument(
        HELDOUT_PLACEMENTS,
        metavar="NAMES|N|N:NAMES",
        help="the same for held-out speakers and for development speakers, on whom models are "
        "tuned; each of the two gets rooms and noises of its own; default: those of --placements",
    )
    parser.add_argument(
        PLACEMENT_SEED,
        type=int,
        metavar="N",
        help="draws rooms, noises and each utterance's placements; default 0",
    )


def add_base_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the earlier run from which a run takes over all, or the labelled part."""
    base = parser.add_mutually_exclusive_group()
    base.add_argument(
        EXTENDS,
        metavar="URI",
        default="",
        help="an earlier, finished run in the folder of --run: select the metadata that it and the "
        "runs before it have not read, reuse their features, targets and partitions, and take over "
        "the labelled data, the teacher and the baseline; docs/increments.md",
    )
    base.add_argument(
        LABELLED_FROM,
        metavar="URI",
        default="",
        help="an earlier run in the folder of --run whose labelled data, alignments, teacher and "
        "baseline this one takes over, for another selection of unlabelled speech: nothing "
        "supervised is trained again; docs/increments.md",
    )


def add_device_argument(parser: argparse.ArgumentParser, default: str = AUTO) -> None:
    """Add the argument that decides where ranks have their models."""
    parser.add_argument(
        "--device",
        type=_device,
        default=default,
        metavar="DEVICE",
        help="where models train and score: auto is a GPU for each rank where the host has GPUs, "
        "else the CPU; cpu; cuda is a GPU for each rank, or an error; cuda:N is GPU N, for one "
        f"rank; default {default}",
    )


def _device(text: str) -> str:
    if DEVICE.fullmatch(text):
        return text
    raise argparse.ArgumentTypeError(
        f"{text}: need auto, cpu, cuda, or a GPU by its number, such as cuda:0"
    )


def add_dev_share_argument(parser: argparse.ArgumentParser) -> None:
    """Add the share of the labelled speakers that become development speakers."""
    parser.add_argument(
        DEV_SHARE,
        type=number_in(DEV_SHARES),
        default=0.0,
        metavar="SHARE",
        help="share of the labelled speakers that become development speakers, by a hash of their "
        "ids: no model learns from them, and the language model and scales are tuned on them; "
        f"{DEV_SHARES.need}; default 0. With manifests it is about this share, as each speaker is "
        "drawn alone. Leave it out where dev.speakers or a manifest dev=URI has them",
    )


@dataclass(frozen=True, slots=True)
class StoredToml:
    """StoredToml is a recipe or a cluster file in S3, where all hosts of a cluster can read it."""

    uri: str

    def __str__(self) -> str:
        return self.uri

    def read_bytes(self) -> bytes:
        """Read it; ConfigurationError where it cannot be read, or is no such file by its size."""
        from infra.store.object_store import ObjectStore, StoreError  # noqa: PLC0415 - boto3

        try:
            part = ObjectStore((self.uri,)).fetch_range(self.uri, 0, MAX_FILE_BYTES)
        except StoreError as error:
            raise ConfigurationError(f"{printable(str(error))}") from error
        if part.object_bytes > MAX_FILE_BYTES:
            raise ConfigurationError(f"{self.uri}: need at most {MAX_FILE_BYTES} bytes")
        return part.data


def toml_path(path: str) -> str | StoredToml:
    """Return what `read_toml` reads: the path as given, or an object in S3."""
    return StoredToml(path) if is_s3(path) and not holds_password(path) else path


def recipe_path(recipe: str) -> str | Readable:
    """Return a recipe's file: one of jobs/recipes by name, or the path or URI as given."""
    if is_s3(recipe):
        return toml_path(recipe)
    try:
        ours = RECIPES / f"{recipe}.toml"
        return ours if ours.is_file() and not Path(recipe).is_file() else recipe
    except OSError:  # longer than a file's name may be; reading it says so
        return recipe


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name other clusters than the recipe's or each step's own."""
    text = "cluster TOML, also in S3, or a name in infra/clusters, for all steps"
    parser.add_argument(CLUSTER_OPTIONS[0], metavar="FILE", help=f"{text}; default: the recipe's")
    add_step_cluster_argument(parser)


def add_step_cluster_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names another cluster for one step."""
    text = "cluster file of one step, as STEP=FILE; repeat it for more"
    option, metavar = CLUSTER_OPTIONS[1], "STEP=FILE"
    parser.add_argument(option, action="append", default=[], metavar=metavar, help=text)


def step_clusters(given: Sequence[str]) -> dict[str, str]:
    """Return the cluster files of --step-cluster by step; ConfigurationError for other steps."""
    found = {}
    for text in given:
        step, _, file = text.partition("=")
        if step not in STEPS or not file:
            need = f"need STEP=FILE, of the steps {', '.join(STEPS)}"
            raise ConfigurationError(f"--step-cluster {printable(text)}: {need}")
        found[step] = file
    return found


def cluster_of(step: str, arguments: argparse.Namespace, of_recipe: str = "") -> Cluster:
    """Read a step's cluster: that of --step-cluster, of --cluster, of the recipe, or its own."""
    every = getattr(arguments, "cluster", None) or of_recipe
    given = step_clusters(getattr(arguments, "step_cluster", []))
    return load_cluster(toml_path(given.get(step) or every or step))


def add_launch_arguments(parser: argparse.ArgumentParser, device: str = AUTO) -> None:
    """Add the arguments that decide where all steps run, and on how many ranks they train."""
    add_base_arguments(parser)
    add_cluster_arguments(parser)
    add_ranks_arguments(parser)
    add_device_argument(parser, device)
    add_dev_share_argument(parser)


def add_run_arguments(parser: argparse.ArgumentParser, device: str = AUTO) -> None:
    """Add the run, where its steps run, the arguments that choose among them, and how they log."""
    add, steps = parser.add_argument, tuple(STEPS)
    add("--run", required=True, help="folder or s3:// URI that holds the run")
    add_launch_arguments(parser, device)
    later = "start at this step; those before it must be finished"
    add("--from", dest="first", choices=steps, metavar="STEP", help=later)
    alone = "run this step alone; repeat it for more"
    add("--only", action="append", default=[], choices=steps, metavar="STEP", help=alone)
    listing = "list what each step would read and write, and where stored work is of another recipe"
    add("--dry-run", action="store_true", help=listing)
    add_log_argument(parser)


def given_options(arguments: argparse.Namespace, options: Sequence[str]) -> list[str]:
    """Return those of some options that were given, each with its value, as words."""
    found = []
    for option in options:
        given = getattr(arguments, option[2:].replace("-", "_"), None)
        for value in given if isinstance(given, list) else [given]:
            if value not in (None, "") and (value or option != DEV_SHARE):
                found += [option, str(value)]
    return found


def require_source_options(arguments: argparse.Namespace) -> None:
    """Raise ConfigurationError for options of another source than what is ingested.

    Also for a share of development speakers that no manifest has, or that one lists. Not every
    command takes a Kaldi directory and such a share.
    """
    kaldi_dir = getattr(arguments, "kaldi_dir", None)
    if not arguments.manifest:
        taken = (LOCALE, TRANSCRIPTS) if kaldi_dir else ()
        names = [name for name in MANIFEST_OPTIONS if name not in taken]
        if unused := given_options(arguments, names)[::2]:
            source = KALDI_DIR if kaldi_dir else f"no {MANIFEST}"
            is_beside = kaldi_dir and unused[0] in (LEXICON, LANGUAGE_MODEL)
            remedy = "put the files into the directory" if is_beside else f"leave out {unused[0]}"
            said = f"with {MANIFEST} alone: {', '.join(unused)}"
            raise ConfigurationError(f"{source}: {said}: {remedy}")
        of_ingest = given_options(arguments, [*PLACEMENT_OPTIONS, DEV_SHARE])
        if of_ingest and not kaldi_dir:
            remedy = f"give {KALDI_DIR} or {MANIFEST}, or leave out {of_ingest[0]}"
            raise ConfigurationError(f"{of_ingest[0]}: nothing is ingested: {remedy}")
    elif getattr(arguments, "dev_share", 0.0):
        subsets = {subset_and_uri(each)[0] for each in arguments.manifest}
        if DEV in subsets:
            remedy = f"leave out --dev-share, or {MANIFEST} {DEV}=URI"
            raise ConfigurationError(f"--dev-share: the development speakers are given: {remedy}")
        if LABELLED not in subsets:
            need = f"need {MANIFEST} {LABELLED}=URI, or leave it out"
            raise ConfigurationError(f"--dev-share: a share of the labelled speakers: {need}")


def source_uris(arguments: argparse.Namespace) -> list[str]:
    """Return the URIs of manifests, and of what is read beside them."""
    named = [subset_and_uri(each)[1] for each in arguments.manifest or ()]
    heard = [recognizer_and_uri(each)[1] for each in arguments.transcripts]
    texts = (arguments.recordings, arguments.lexicon, arguments.language_model, *heard)
    return [*named, *filter(None, texts)]


def require_no_passwords(words: Sequence[str]) -> None:
    """Raise ConfigurationError for a word that other users may see, and should not."""
    for word in words:
        if holds_password(word):
            remedy = "take it out; credentials come from the environment, a profile or a role"
            raise ConfigurationError(f"{printable(word)}: a password or signature: {remedy}")


def names_labelled_alone(arguments: argparse.Namespace) -> bool:
    """Return whether what is ingested, a Kaldi directory or manifests, has no unlabelled speech."""
    if arguments.kaldi_dir:
        folder = Path(arguments.kaldi_dir)
        return folder.is_dir() and not (folder / UNLABELLED_SPEAKERS).exists()
    subsets = {subset_and_uri(each)[0] for each in arguments.manifest or ()}
    return bool(subsets) and UNLABELLED not in subsets


def recognizer_and_uri(text: str) -> tuple[str, str]:
    """Read NAME=URI; ConfigurationError for anything else."""
    recognizer, _, uri = text.partition("=")
    try:
        require_recognizer(recognizer)
    except ValueError as error:
        raise ConfigurationError(f"{TRANSCRIPTS} {printable(text)}: {error}") from error
    if not uri:
        raise ConfigurationError(f"{TRANSCRIPTS} {printable(text)}: need NAME=URI")
    return recognizer, normalize_uri(uri)


def subset_and_uri(text: str) -> tuple[str, str]:
    """Read [SUBSET=]URI; ConfigurationError for an unknown subset."""
    subset, separator, uri = text.partition("=")
    # A key of S3 may have an equals sign, but begins with a scheme or a slash.
    if not separator or "/" in subset:
        return UNLABELLED, normalize_uri(text)
    if subset not in ALL_SUBSETS or not uri:
        need = f"need [SUBSET=]URI, with a subset of {', '.join(ALL_SUBSETS)}"
        raise ConfigurationError(f"{MANIFEST} {printable(text)}: {need}")
    return subset, normalize_uri(uri)
