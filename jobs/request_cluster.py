"""Print what starts a step on a platform, or on AWS send it.

megahour request_cluster --step extract_features --recipe R --run URI --account emr.toml
"""

import argparse
import sys
from pathlib import Path

from infra.cluster import Cluster
from infra.log_lines import report_error
from infra.platforms.accounts import PLATFORMS, load_account
from infra.platforms.emr import CODE, Emr, LaunchError, run_to_end
from infra.platforms.platform import Platform, StepLaunch
from infra.platforms.slurm import Slurm
from infra.settings import ConfigurationError, printable
from infra.store.object_store import ObjectStore
from infra.store.uris import is_s3, normalize_uri
from jobs.cli.arguments import (
    DEV_SHARE,
    INGEST_OPTIONS,
    MANIFEST,
    PLACEMENT_OPTIONS,
    Parser,
    add_base_arguments,
    add_cluster_arguments,
    add_dev_share_argument,
    add_manifest_arguments,
    add_placement_arguments,
    add_recipe_arguments,
    cluster_of,
    given_options,
    recipe_path,
    require_no_passwords,
    require_source_options,
    source_uris,
    step_clusters,
)
from jobs.cli.command_line import ending
from jobs.cli.job import require_bases, require_prefixes
from jobs.run_table import INGEST, STEPS, due_steps
from pipeline.runs.manifest import is_finished, manifest_uri
from pipeline.runs.names import EXTENDS, LABELLED_FROM
from training.settings.recipe import Recipe, check_ranks, read_recipe

NAME = "request_cluster"

HELP = f"""\
Print what starts a step on a platform, made from the step's cluster file and the account file. The
account's `platform` is one of {", ".join(PLATFORMS)}.
docs/running has a page for each: its account file, what to upload, and what takes the output. The
output of emr, say, goes to AWS:

  megahour request_cluster --step realign ... > realign.json
  aws emr run-job-flow --cli-input-json file://realign.json

With --send, which is for emr, the cluster is launched, and the command waits for its end. Given
again while the cluster lives, it waits for that one. The cluster ends itself with the step.

With --manifest ingest is a Spark step; a directory is copied where it lies. A recipe or a cluster
file of your own lies in S3, --recipe s3://bucket/mine.toml; for emr also beside the code.
"""


def make_launch(arguments: argparse.Namespace, cluster: Cluster, platform: Platform) -> StepLaunch:
    """Return the step with its own arguments; ConfigurationError for files that hosts lack."""
    step = STEPS[arguments.step]
    own = step_clusters(arguments.step_cluster).get(arguments.step, arguments.cluster)
    words = ["--recipe", _on_host("--recipe", arguments.recipe, platform), "--run", arguments.run]
    if own:
        words += ["--cluster", _on_host("--cluster", own, platform)]
    names = ("--set", EXTENDS, LABELLED_FROM, *(INGEST_OPTIONS if arguments.step == INGEST else ()))
    words += given_options(arguments, names)
    return StepLaunch(
        arguments.step,
        arguments.run,
        "Spark" if step.is_on_spark else step.starter,
        cluster,
        tuple(words),
        # The driver draws rooms and noises; tasks read them from the corpus.
        needs_rooms=arguments.step == INGEST and arguments.placements is not None,
    )


def _on_host(option: str, name_or_path: str, platform: Platform) -> str:
    """Return a recipe's or cluster file's name, or the place at which hosts find it."""
    if is_s3(name_or_path) or not name_or_path.endswith(".toml"):
        return name_or_path
    if isinstance(platform, Emr):
        return f"{CODE}/{Path(name_or_path).name}"
    if isinstance(platform, Slurm):  # hosts share a file system
        return str(Path(name_or_path).resolve())
    need = "need a name of ours, or s3://bucket/key, for all hosts"
    raise ConfigurationError(f"{option} {printable(name_or_path)}: {need}")


def send(platform: Platform, launch: StepLaunch, recipe: Recipe) -> None:
    """Launch the cluster and wait; LaunchError unless the manifests that are due are there then."""
    if not isinstance(platform, Emr):
        raise ConfigurationError("--send: it is for emr: give the output to the platform's command")
    store = ObjectStore((launch.run,))
    due = due_steps(recipe, launch.step, lambda step: is_finished(store, launch.run, step))
    request = platform.launch_request(launch)

    def report(text: str) -> None:
        print(f"{NAME}: {text}", file=sys.stderr, flush=True)

    run_to_end(request, platform.region, report)
    manifests = [manifest_uri(launch.run, step) for step in due]
    if missing := [uri for uri in manifests if not store.exists(uri)]:
        raise LaunchError(
            f"{request.name}: ended without {', '.join(missing)}: read the log of its hosts, then "
            "give the same command again to resume"
        )


def main() -> None:
    """Parse the command line; print the request, or send it; exit with its code."""
    arguments = _parser().parse_args()
    try:
        with ending(NAME):
            platform = load_account(arguments.account)
            _require_places(arguments, has_shared_files=isinstance(platform, Slurm))
            recipe = read_recipe(recipe_path(arguments.recipe), arguments.set)
            cluster = cluster_of(arguments.step, arguments, recipe.cluster)
            require_remote(cluster)
            require_prefixes(arguments.step, recipe, cluster, arguments.run)
            _require_possible(arguments, recipe)
            launch = make_launch(arguments, cluster, platform)
            if section := STEPS[arguments.step].trains:
                per_host = launch.ranks_per_host
                num_ranks = per_host * cluster.num_instances
                check_ranks(getattr(recipe, section), section, num_ranks, per_host)
            request = platform.request(launch)
            if arguments.send:
                send(platform, launch, recipe)
            else:
                print(request)
    except KeyboardInterrupt:
        report_error(NAME, "interrupted: the cluster lives on; the same command waits")
        sys.exit(130)


def require_remote(cluster: Cluster) -> None:
    """Raise ConfigurationError for a cluster that nothing launches."""
    if cluster.is_local:
        remedy = "give --cluster, such as the step's name, or --set cluster=''"
        said = f"cluster with master {cluster.master} is this computer"
        raise ConfigurationError(f"{said}: {remedy}")


def _require_possible(arguments: argparse.Namespace, recipe: Recipe) -> None:
    """Raise ValueError for bases and placements that the step would refuse on its hosts."""
    require_bases(arguments, recipe)
    if arguments.placements is not None or arguments.heldout_placements is not None:
        from jobs.ingest import simulation_of  # noqa: PLC0415 - imports NumPy

        simulation_of(arguments)


def _require_places(arguments: argparse.Namespace, *, has_shared_files: bool) -> None:
    """Require a step, and a run and manifests that other hosts can reach."""
    arguments.run = normalize_uri(arguments.run)
    if arguments.step == INGEST and not arguments.manifest:
        remedy = "a directory is copied where it lies, without a cluster"
        raise ConfigurationError(f"--step {INGEST}: need {MANIFEST}: {remedy}")
    of_ingest = given_options(arguments, [MANIFEST, *PLACEMENT_OPTIONS, DEV_SHARE])
    if arguments.step != INGEST and of_ingest:
        raise ConfigurationError(f"--step {arguments.step}: {of_ingest[0]} is for {INGEST} alone")
    require_source_options(arguments)
    uris = source_uris(arguments)
    require_no_passwords([arguments.run, *uris])
    if has_shared_files:
        return
    for uri in uris:
        if not is_s3(uri):
            raise ConfigurationError(f"{printable(uri)}: need s3://bucket/key, for all hosts")
    if not is_s3(arguments.run):
        raise ConfigurationError(f"--run {arguments.run}: need s3://bucket/prefix, for all hosts")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=f"megahour {NAME}",
        description=HELP,
        epilog="Exit codes: 0 printed, or ended well; 1 the cluster failed; 2 bad usage; 130 "
        "interrupted.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--step", required=True, choices=STEPS, metavar="STEP", help="one of " + ", ".join(STEPS))
    add_recipe_arguments(parser)
    add("--run", required=True, help="s3:// URI that holds the run")
    add_cluster_arguments(parser)
    add_base_arguments(parser)
    add_manifest_arguments(parser)
    add_placement_arguments(parser)
    add_dev_share_argument(parser)
    add("--account", required=True, metavar="FILE", help="TOML file of the platform's account")
    add("--send", action="store_true", help="launch the cluster of emr, and wait for its end")
    return parser


if __name__ == "__main__":
    main()
