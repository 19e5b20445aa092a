"""Print the IAM roles of the steps as a CloudFormation template.

megahour roles > roles.json
"""

import json
from collections.abc import Mapping, Sequence

from infra.aws.step_roles import roles_template
from infra.cluster import Cluster, load_cluster
from infra.settings import ConfigurationError, printable
from infra.store.object_store import normalize_uri
from infra.store.uris import is_s3
from jobs.cli.arguments import Parser, add_step_cluster_argument, step_clusters, toml_path
from jobs.cli.command_line import ending
from jobs.run_table import STEPS, spark_steps

QUERIES = ("export", "inspect", "retry", "status", "verify")
"""The queries that have a role of their own.

`transcribe` reads no store, and `export_shards` writes to the user's own disk.
"""

AUDIO_QUERIES = ("export", "inspect", "verify")
"""The queries that, as some steps, read audio below corpus.audio_prefixes."""

_MAX_LINE = 400


def template(clusters: Mapping[str, str], audio: Sequence[str] = ()) -> dict[str, object]:
    """Return the template for the steps' own cluster files, or for those given by step.

    Steps that read audio may read below the `audio` prefixes, as s3://bucket/prefix, too.
    """

    def cluster_of(step: str) -> Cluster:
        return load_cluster(toml_path(clusters.get(step, step)))

    on_emr = {step: cluster_of(step) for step in spark_steps()}
    others = [step for step in (*STEPS, *QUERIES) if step not in on_emr]
    on_hosts = {step: cluster_of(step) for step in others}
    readers = [name for name, step in STEPS.items() if step.reads_audio]
    places = dict.fromkeys((*readers, *AUDIO_QUERIES), _places(audio))
    return roles_template(on_emr, on_hosts, places)


def _places(prefixes: Sequence[str]) -> tuple[str, ...]:
    """Return prefixes as bucket and folder; ConfigurationError for one that is not in S3."""
    for prefix in prefixes:
        if not is_s3(normalize_uri(prefix)) or "$" in prefix or "*" in prefix:
            need = "need s3://bucket/prefix, without * and $"
            raise ConfigurationError(f"--audio-prefix {printable(prefix)}: {need}")
    return tuple(normalize_uri(each).removeprefix("s3://") for each in prefixes)


def text_of(document: object, indent: str = "") -> str:
    """Return the template as JSON below the 51,200 bytes that CloudFormation takes from a file.

    What fits into a line takes one.
    """
    line = json.dumps(document)
    if len(line) + len(indent) <= _MAX_LINE or not isinstance(document, dict | list):
        return line
    inner = f"{indent} "
    if isinstance(document, dict):
        rows = [f"{json.dumps(key)}: {text_of(each, inner)}" for key, each in document.items()]
        return "{\n" + ",\n".join(inner + row for row in rows) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + text_of(each, inner) for each in document) + f"\n{indent}]"


def main() -> None:
    """Parse the command line and print the template; exit with 0, 1 or 2."""
    parser = Parser(
        prog="megahour roles",
        description="Print a CloudFormation template with a role for each step and query. A role "
        "may read, write and delete what its step's cluster file names, and nothing else.",
        epilog="Exit codes: 0 printed, 1 failed, 2 bad usage or cluster file.",
    )
    add_step_cluster_argument(parser)
    text = "s3:// prefix of corpus.audio_prefixes, which steps that read audio may read; repeatable"
    parser.add_argument("--audio-prefix", action="append", default=[], metavar="URI", help=text)
    arguments = parser.parse_args()
    with ending("roles"):
        print(text_of(template(step_clusters(arguments.step_cluster), arguments.audio_prefix)))


if __name__ == "__main__":
    main()
