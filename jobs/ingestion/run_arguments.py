"""The arguments of a whole run, and those that it hands to ingest."""

import argparse

from infra.settings import ConfigurationError, printable
from infra.store.uris import normalize_uri
from jobs.cli.catalogue import STEPS
from jobs.cli.parser import (
    AUTO,
    HELDOUT_PLACEMENTS,
    KALDI_DIR,
    LANGUAGE_MODEL,
    MANIFEST,
    PLACEMENT_SEED,
    TRAINING_PLACEMENTS,
    add_dev_share_argument,
    add_device_argument,
    add_extends_argument,
    add_log_argument,
    add_ranks_arguments,
)
from pipeline.runs.names import ALL_SUBSETS, DEV, LABELLED, UNLABELLED


def add_run_arguments(parser: argparse.ArgumentParser, device: str = AUTO) -> None:
    """Add the arguments that decide where all steps run, and on how many ranks they train."""
    parser.add_argument("--run", required=True, help="folder or s3:// URI that holds the run")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="replace one value of the recipe; repeat it for more",
    )
    add_extends_argument(parser)
    add_steps_arguments(parser)
    add_ranks_arguments(parser)
    add_device_argument(parser, device)
    add_dev_share_argument(parser)


def add_steps_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose among the steps, and how they log."""
    add, steps = parser.add_argument, tuple(STEPS)
    later = "start at this step; those before it must be finished"
    add("--from", dest="first", choices=steps, metavar="STEP", help=later)
    alone = "run this step alone; repeat it for more"
    add("--only", action="append", default=[], choices=steps, metavar="STEP", help=alone)
    listing = "list what each step would read and write, and where stored work is of another recipe"
    add("--dry-run", action="store_true", help=listing)
    cluster = "cluster TOML, or a name in infra/clusters, for all steps; default: the recipe's"
    add("--cluster", help=cluster)
    add_log_argument(parser)


def placement_arguments(arguments: argparse.Namespace) -> list[str]:
    """Return the arguments that ingest receives for its placements."""
    given = {
        TRAINING_PLACEMENTS: arguments.placements,
        HELDOUT_PLACEMENTS: arguments.heldout_placements,
        PLACEMENT_SEED: arguments.placement_seed,
    }
    return [part for name, text in given.items() if text is not None for part in (name, str(text))]


def dev_share_arguments(arguments: argparse.Namespace) -> list[str]:
    """Return the arguments that ingest receives for its development speakers."""
    return ["--dev-share", str(arguments.dev_share)] if arguments.dev_share else []


def locale_arguments(arguments: argparse.Namespace) -> list[str]:
    """Return the arguments that ingest receives for the speakers of a directory."""
    is_given = arguments.kaldi_dir and arguments.locale
    return ["--locale", arguments.locale] if is_given else []


def require_source_options(arguments: argparse.Namespace) -> None:
    """Raise ConfigurationError for options of another source than what is ingested."""
    require_used_options(arguments)
    require_manifest_options(arguments)


def require_used_options(arguments: argparse.Namespace) -> None:
    """Raise ConfigurationError for options of manifests without one, which would be passed over."""
    if arguments.manifest:
        return
    of_files = {"--lexicon": arguments.lexicon, LANGUAGE_MODEL: arguments.language_model}
    given = {
        "--format": arguments.format,
        "--recordings": arguments.recordings,
        "--columns": arguments.columns,
        "--ignore-columns": arguments.ignore_columns,
        "--speaker-buckets": arguments.speaker_buckets,
        **({} if arguments.kaldi_dir else {"--locale": arguments.locale}),
        **of_files,
    }
    if unused := [name for name, value in given.items() if value not in (None, "")]:
        source = KALDI_DIR if arguments.kaldi_dir else f"no {MANIFEST}"
        in_directory = arguments.kaldi_dir and unused[0] in of_files
        remedy = "put the files into the directory" if in_directory else f"leave out {unused[0]}"
        raise ConfigurationError(f"{source}: with {MANIFEST} alone: {', '.join(unused)}: {remedy}")


def require_manifest_options(arguments: argparse.Namespace) -> None:
    """Raise ConfigurationError for a share of speakers that no manifest has, or that one lists."""
    if not (arguments.manifest and arguments.dev_share):
        return
    subsets = {subset_and_uri(each)[0] for each in arguments.manifest}
    if DEV in subsets:
        remedy = f"leave out --dev-share, or {MANIFEST} {DEV}=URI"
        raise ConfigurationError(f"--dev-share: the development speakers are given: {remedy}")
    if LABELLED not in subsets:
        need = f"need {MANIFEST} {LABELLED}=URI, or leave it out"
        raise ConfigurationError(f"--dev-share: a share of the labelled speakers: {need}")


def subset_and_uri(text: str) -> tuple[str, str]:
    """Read [SUBSET=]URI; ConfigurationError for a subset that there is not."""
    subset, separator, uri = text.partition("=")
    # A key of S3 may have an equals sign, but begins with a scheme or a slash.
    if not separator or "/" in subset:
        return UNLABELLED, normalize_uri(text)
    if subset not in ALL_SUBSETS or not uri:
        need = f"need [SUBSET=]URI, with a subset of {', '.join(ALL_SUBSETS)}"
        raise ConfigurationError(f"{MANIFEST} {printable(text)}: {need}")
    return subset, normalize_uri(uri)
