"""Parse command lines without showing a password in a complaint."""

import argparse
import math
import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import NoReturn

from infra.log_lines import LOG_FORMATS, log_format
from infra.settings import Range, printable

DEV_SHARES = Range(0.001, 0.5, zero="none")
"""The shares of the labelled speakers that may become development speakers."""

TRAINING_PLACEMENTS, HELDOUT_PLACEMENTS = "--placements", "--heldout-placements"
PLACEMENT_SEED = "--placement-seed"

EXTENDS = "--extends"

KALDI_DIR, MANIFEST = "--kaldi-dir", "--manifest"
LANGUAGE_MODEL = "--language-model"
NEMO, LIBRISPEECH, TABLE = "nemo", "librispeech", "table"
MANIFEST_FORMATS = (NEMO, "lhotse", "shar", "kaldi", LIBRISPEECH, "common_voice", TABLE)
"""The values of --format; without one it is the first."""

DEFAULT_SPEAKER_BUCKETS = 16

AUTO, ON_CPU = "auto", "cpu"
DEVICE = re.compile(rf"{AUTO}|{ON_CPU}|cuda(:(?P<number>[0-9]{{1,4}}))?")
"""The values of --device."""

RECIPES = files("jobs") / "recipes"  # the code may lie in a zip


class Parser(argparse.ArgumentParser):
    """Parser is argparse's; what it complains of is one line, and its passwords are stars."""

    def error(self, message: str) -> NoReturn:
        """Print usage and message; exit with 2."""
        super().error(printable(message))


def add_log_argument(parser: argparse.ArgumentParser) -> None:
    """Add the format of the lines on standard error; steps that a run starts have its own."""
    parser.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default=log_format(),
        help="lines on standard error: text with time and step, or one JSON object a line",
    )


def add_ranks_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that decide on how many ranks a run trains."""
    for option, models, default in (
        ("--supervised-ranks", "the baseline and the teacher", 2),
        ("--student-ranks", "the student", 4),
    ):
        text = f"processes that train {models}, default {default}"
        parser.add_argument(option, type=int, default=default, metavar="N", help=text)


def add_source_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the arguments that name what is ingested: a directory to copy, or manifests."""
    source = parser.add_mutually_exclusive_group(required=required)
    source.add_argument(
        KALDI_DIR,
        metavar="DIR",
        help="Kaldi data directory to copy, with labelled, unlabelled and heldout .speakers, and "
        "dev.speakers if you have some",
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
        choices=MANIFEST_FORMATS,
        help="format of all manifests: nemo is JSON lines of audio_filepath, duration, text and "
        "offset; lhotse is cuts, or supervisions with --recordings; shar, kaldi and librispeech "
        "are folders; common_voice is a .tsv beside clips/; table is JSON lines, CSV or Parquet, "
        "see --columns; default nemo",
    )
    add = parser.add_argument
    add(
        "--recordings",
        metavar="URI",
        help="lhotse's recordings, for --format lhotse with supervisions in place of cuts",
    )
    add(
        "--columns",
        metavar="FIELD=COLUMN,...",
        default="",
        help="for --format table: the columns of fields that have another name there, such as "
        "audio_uri=path,speaker_id=client",
    )
    add(
        "--ignore-columns",
        metavar="COLUMN,...",
        default="",
        help="columns of tables, keys of JSON, or tables of a Kaldi directory, to pass over; "
        "others that are neither used nor known to be harmless are refused",
    )
    add("--lexicon", metavar="URI", help="Kaldi's lexicon.txt, to align and decode with")
    add(
        LANGUAGE_MODEL,
        metavar="URI",
        help="a language model of your own beside manifests: .arpa, or .txt with a sentence a "
        "line, or either in .gz; the corpus has it as language_model.arpa, and so on, which the "
        "recipe's evaluation.arpa or evaluation.language_model_text must name",
    )
    add("--locale", help="the locale of rows, or of a directory's speakers, without one; or und")
    add(
        "--speaker-buckets",
        type=int,
        metavar="N",
        help="speaker buckets of the metadata, each read by one task of a selection; default "
        f"{DEFAULT_SPEAKER_BUCKETS}; take about one for each million utterances",
    )


def manifest_options(arguments: argparse.Namespace) -> list[str]:
    """Return the options that ingest receives for its manifests."""
    if not arguments.manifest:
        return []
    given = {
        "--format": arguments.format,
        "--recordings": arguments.recordings,
        "--columns": arguments.columns,
        "--ignore-columns": arguments.ignore_columns,
        "--lexicon": arguments.lexicon,
        LANGUAGE_MODEL: arguments.language_model,
        "--locale": arguments.locale,
        "--speaker-buckets": arguments.speaker_buckets,
    }
    named = [part for each in arguments.manifest for part in (MANIFEST, each)]
    # 0 buckets are given, and refused.
    values = {name: str(value) for name, value in given.items() if value not in (None, "")}
    return [*named, *(part for pair in values.items() for part in pair)]


def add_placement_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that decide in which placements ingest simulates utterances."""
    parser.add_argument(
        TRAINING_PLACEMENTS,
        metavar="NAMES|N|N:NAMES",
        help="simulate each utterance in these placements, such as clean,DP1,DP3 (clean is the "
        "audio as it is), in N of DP1 to DP5, or in N of these, such as 2:clean,DP1,DP3, drawn for "
        "each utterance; default: the audio alone. Of manifests, clean audio stays where it is. "
        "Needs pip install megahour[demo]",
    )
    parser.add_argument(
        HELDOUT_PLACEMENTS,
        metavar="NAMES|N|N:NAMES",
        help="the same for held-out speakers and for development speakers, on whom models are "
        "tuned; each of the two hears rooms and noises of its own; default: those of --placements",
    )
    parser.add_argument(
        PLACEMENT_SEED,
        type=int,
        metavar="N",
        help="draws rooms, noises and each utterance's placements; default 0",
    )


def add_extends_argument(parser: argparse.ArgumentParser) -> None:
    """Add the earlier run of which a run is an increment."""
    parser.add_argument(
        EXTENDS,
        metavar="URI",
        default="",
        help="an earlier, finished run in the folder of --run: select the metadata that it and the "
        "runs before it have not read, reuse their features, targets and partitions, and take over "
        "the labelled data, the teacher and the baseline; docs/increments.md",
    )


def extends_options(arguments: argparse.Namespace) -> list[str]:
    """Return the arguments by which a step is one of an increment."""
    return [EXTENDS, arguments.extends] if arguments.extends else []


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
        "--dev-share",
        type=_dev_share,
        default=0.0,
        metavar="SHARE",
        help="share of the labelled speakers, chosen by a hash of their ids, on which language "
        f"model and scales are tuned in place of training; {DEV_SHARES.need}; default 0. Of "
        "manifests' speakers each is drawn alone, about that share of them. Where dev.speakers or "
        "a manifest dev=URI has them, leave it out",
    )


def _dev_share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not DEV_SHARES.admits(share):
        raise argparse.ArgumentTypeError(f"{printable(text)}: need {DEV_SHARES.need}")
    return share


def recipe_path(recipe: str) -> str | Traversable:
    """Return a recipe's file: the path as given, or one of jobs/recipes by name."""
    try:
        ours = RECIPES / f"{recipe}.toml"
        return ours if ours.is_file() and not Path(recipe).is_file() else recipe
    except OSError:  # longer than a file's name may be; reading it says so
        return recipe
