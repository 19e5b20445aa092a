"""Print the IAM roles of the steps as a CloudFormation template.

megahour roles > roles.json
"""

import argparse
import json
import re
import sys

from infra.aws.step_roles import roles_template
from infra.cluster import Cluster, load_cluster
from infra.configuration import ConfigurationError
from jobs.cli.catalogue import STEPS
from jobs.cli.command_line import fail
from jobs.cli.parser import Parser
from jobs.plan import step_clusters

QUERIES = ("inspect_utterance", "retry", "verify")
"""The queries that have a cluster file, and so a role, of their own."""


_ONE_THING = re.compile(r"([\[{])\s+([^\n]+[^\n,{\[])\s+([\]}])")


def template(clusters: dict[str, str]) -> dict[str, object]:
    """Return the template for the steps' own cluster files, or for those given by step."""

    def cluster_of(step: str) -> Cluster:
        return load_cluster(clusters.get(step, step))

    on_emr = {step: cluster_of(step) for step, starter in STEPS.items() if starter == "Spark"}
    others = [step for step in (*STEPS, *QUERIES) if step not in on_emr]
    return roles_template(on_emr, {step: cluster_of(step) for step in others})


def text_of(document: dict[str, object]) -> str:
    """Return the template as JSON below the 51,200 bytes that CloudFormation takes from a file."""
    text = json.dumps(document, indent=1)
    for _ in range(2):  # a table or list of one thing takes one line, not three
        text = _ONE_THING.sub(r"\1\2\3", text)
    return text


def main() -> None:
    """Parse the command line and print the template; exit with 0 or 2."""
    parser = Parser(
        prog="megahour roles",
        description="Print a CloudFormation template with a role for each step and query. A role "
        "may read, write and delete what its step's cluster file names, and nothing else. "
        "infra/cloudformation/roles.json has the roles of our own cluster files.",
        epilog="Exit codes: 0 printed, 2 bad usage or cluster file.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = "a cluster file of your own for one step; repeat it for more"
    parser.add_argument(
        "--step-cluster", action="append", default=[], metavar="STEP=CLUSTER", help=text
    )
    arguments = parser.parse_args()
    try:
        found = template(step_clusters(arguments.step_cluster))
    except ConfigurationError as error:
        sys.exit(fail("roles", error, 2))
    print(text_of(found))
    sys.exit(0)


if __name__ == "__main__":
    main()
