"""Print or send the request for a step's cluster on EMR or EC2.

megahour request_cluster --step extract_features --recipe R --run URI --account account.toml
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from infra.aws.cluster_launch import (
    CODE,
    LEADER,
    RESERVATION,
    LaunchError,
    LaunchRequest,
    emr_request,
    host_request,
    load_account,
    run_to_end,
    validate,
)
from infra.cluster import Cluster, load_cluster
from infra.log_lines import report_error
from infra.settings import ConfigurationError, printable
from infra.spark.session import kubernetes_options
from infra.store.object_store import ObjectStore, StoreError
from infra.store.objects import PrefixError
from infra.store.uris import is_s3, normalize_uri
from jobs.cli.arguments import (
    DEV_SHARE,
    EXTENDS,
    INGEST_OPTIONS,
    MANIFEST,
    PLACEMENT_OPTIONS,
    Parser,
    add_dev_share_argument,
    add_extends_argument,
    add_manifest_arguments,
    add_placement_arguments,
    add_recipe_arguments,
    given_options,
    recipe_path,
    require_source_options,
    subset_and_uri,
)
from jobs.cli.command_line import fail
from jobs.cli.job import written_manifests
from jobs.run_table import INGEST, STEPS, spark_steps
from training.settings.recipe import read_recipe

NAME = "request_cluster"
RENDEZVOUS_PORT = 29400

HELP = """\
Print, as JSON, the request for a step's cluster, made from its cluster file: for a Spark step the
RunJobFlow of EMR, for the others the RunInstances of EC2. botocore has checked it. With --manifest
ingest is a Spark step; a directory is copied where it lies. Nothing is sent:

  megahour request_cluster --step align ... > align.json
  aws emr run-job-flow --cli-input-json file://align.json

With --send the cluster is launched, and the command waits for its end. Given again while the
cluster lives, it waits for that one. The cluster ends itself with the step.

With --kubernetes it prints the command line of spark-submit. infra/README.md has the account file,
the images, and what to upload.
"""


def make_request(arguments: argparse.Namespace, cluster: Cluster) -> LaunchRequest:
    """Return the request for the step's cluster; ConfigurationError for what no host can read."""
    account, run = load_account(arguments.account), arguments.run
    given = (arguments.step, run, cluster, account)
    parameters = step_arguments(arguments)
    if STEPS[arguments.step].is_on_spark:
        # The driver draws rooms and noises; tasks read them from the corpus.
        needs_demo = arguments.step == INGEST and arguments.placements
        extras = ("demo",) if needs_demo else STEPS[arguments.step].extras
        return emr_request(*given, parameters, extras)
    module = f"jobs.{arguments.step}"
    if STEPS[arguments.step].starter == "python":
        return host_request(*given, ["python", "-m", module, *parameters])
    ranks = cluster.gpus_per_instance or cluster.executors_per_instance
    several = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{LEADER}:{RENDEZVOUS_PORT}")
    hosts = ("--nnodes", str(cluster.num_instances), *several, "--rdzv-id", RESERVATION)
    torchrun = [
        *("python", "-m", "training.distributed.rank_launcher"),
        *(hosts if cluster.num_instances > 1 else ("--standalone",)),
        *("--nproc-per-node", str(ranks), "--max-restarts", "1", "--module", "--", module),
    ]
    return host_request(*given, [*torchrun, *parameters])


def step_arguments(arguments: argparse.Namespace) -> list[str]:
    """Return the step's own arguments; files of the user's own lie in the folder of the code."""
    cluster = ("--cluster", _on_host(arguments.cluster)) if arguments.cluster else ()
    recipe = _on_host(arguments.recipe)
    names = ("--set", EXTENDS, *(INGEST_OPTIONS if arguments.step == INGEST else ()))
    shared = ["--recipe", recipe, "--run", arguments.run, *cluster]
    return [*shared, *given_options(arguments, names)]


def _on_host(name_or_path: str) -> str:
    is_ours = not name_or_path.endswith(".toml")
    return name_or_path if is_ours else f"{CODE}/{Path(name_or_path).name}"


def kubernetes_command(arguments: argparse.Namespace, cluster: Cluster) -> list[str]:
    """Return the command line that submits a Spark step to Kubernetes."""
    if not STEPS[arguments.step].is_on_spark:
        names = ", ".join(spark_steps())
        raise ConfigurationError(f"--kubernetes: {arguments.step}: need a Spark step: {names}")
    if not arguments.image:
        raise ConfigurationError("--kubernetes: no image: need --image REPOSITORY:TAG")
    options = kubernetes_options(cluster, arguments.kubernetes, arguments.image)
    program = f"local:///opt/megahour/jobs/{arguments.step}.py"
    return ["spark-submit", *options, program, *step_arguments(arguments)]


def send(request: LaunchRequest, arguments: argparse.Namespace, manifests: Sequence[str]) -> None:
    """Launch the cluster and wait; LaunchError unless the step's manifests are there then."""

    def report(text: str) -> None:
        print(f"{NAME}: {text}", file=sys.stderr, flush=True)

    run_to_end(request, load_account(arguments.account).region, report)
    store = ObjectStore((arguments.run,))
    if missing := [uri for uri in manifests if not store.exists(uri)]:
        raise LaunchError(
            f"{request.name}: ended without {', '.join(missing)}: read the log of its hosts, then "
            "give the same command again to resume"
        )


def main() -> None:
    """Parse the command line; print the request, or send it; exit with its code."""
    arguments = _parser().parse_args()
    try:
        _require_places(arguments)
        recipe = read_recipe(recipe_path(arguments.recipe), arguments.set)
        cluster = load_cluster(arguments.cluster or recipe.cluster or arguments.step)
        if cluster.is_local:
            remedy = "give --cluster, such as the step's name, or take it out of the recipe"
            said = f"cluster with master {cluster.master} is this computer"
            raise ConfigurationError(f"{said}: {remedy}")
        if arguments.kubernetes:
            print(shlex.join(kubernetes_command(arguments, cluster)))
            sys.exit(0)
        request = make_request(arguments, cluster)
        validate(request)
        if arguments.send:
            send(request, arguments, written_manifests(recipe, arguments.step, arguments.run))
        else:
            print(json.dumps(request.parameters, indent=2))
    except (PrefixError, ValueError) as error:
        sys.exit(fail(NAME, error, 2))
    except (LaunchError, StoreError) as error:
        sys.exit(fail(NAME, error, 1))
    except KeyboardInterrupt:
        report_error(NAME, "interrupted: the cluster lives on; the same command waits")
        sys.exit(130)
    sys.exit(0)


def _require_places(arguments: argparse.Namespace) -> None:
    """Require a step, a run and manifests that other hosts can reach, and one way to launch it."""
    arguments.run = normalize_uri(arguments.run)
    if arguments.step == INGEST and not arguments.manifest:
        remedy = "a directory is copied where it lies, without a cluster"
        raise ConfigurationError(f"--step {INGEST}: need {MANIFEST}: {remedy}")
    of_ingest = given_options(arguments, [MANIFEST, *PLACEMENT_OPTIONS, DEV_SHARE])
    if arguments.step != INGEST and of_ingest:
        raise ConfigurationError(f"--step {arguments.step}: {of_ingest[0]} is for {INGEST} alone")
    require_source_options(arguments)
    named = [subset_and_uri(each)[1] for each in arguments.manifest or ()]
    texts = (arguments.recordings, arguments.lexicon, arguments.language_model)
    for uri in (*named, *filter(None, texts)):
        if not is_s3(uri):
            raise ConfigurationError(f"{printable(uri)}: need s3://bucket/key, for all hosts")
    if not is_s3(arguments.run):
        raise ConfigurationError(f"--run {arguments.run}: need s3://bucket/prefix, for all hosts")
    if bool(arguments.account) == bool(arguments.kubernetes):
        raise ConfigurationError("need --account FILE for AWS, or --kubernetes MASTER")


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
    add("--cluster", help="cluster TOML, or a name in infra/clusters; default: the step's")
    add_extends_argument(parser)
    add_manifest_arguments(parser)
    add_placement_arguments(parser)
    add_dev_share_argument(parser)
    add("--account", metavar="FILE", help="TOML file of the AWS account")
    add("--send", action="store_true", help="launch the cluster, and wait for its end")
    master = f"URI of the API server, k8s://https://...; images have Spark {version('pyspark')}"
    add("--kubernetes", metavar="MASTER", help=master)
    add(
        "--image",
        metavar="IMAGE",
        help="the image of infra/docker/spark.Dockerfile, for --kubernetes",
    )
    return parser


if __name__ == "__main__":
    main()
