"""A step's role allows what its cluster file names, and storage expires intermediates alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from infra.cluster import load_cluster
from jobs import run_table
from jobs.roles import QUERIES, template, text_of
from pipeline.runs.names import (
    FEATURES_FOLDER,
    LANGUAGE_MODEL_FILES,
    LATTICES_FOLDER,
    PARTITIONS_FOLDER,
    TARGETS_FOLDER,
)
from tests.infra.aws.role_policy import PLACES, Request, allows, logged_requests, role_of
from tests.job_programs import RunJob

FOLDERS = (
    *("corpus", "ingest", "selection", "features", "alignments", "lattices", "models", "graphs"),
    *("targets", "partitions", "certificate", "evaluation", "kbest_costs", "tuning", "report"),
    "steps",
)
ROLES = [name.removesuffix("Role") for name in template({})["Resources"] if name.endswith("Role")]
STEPS = [*run_table.STEPS, *QUERIES]
OTHERS = ("export_shards",)
INFRA = Path(__file__).parents[3] / "infra"
RUN = "arn:aws:s3:::megahour/runs/tiny"


def test_each_step_has_a_role_in_a_template_that_fits_into_a_request() -> None:
    """CloudFormation takes 51,200 bytes."""
    text = text_of(template({}))
    assert json.loads(text) == template({})
    assert len(text) < 51_200
    assert sorted(ROLES) == sorted("".join(map(str.capitalize, s.split("_"))) for s in STEPS)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("action", ["s3:PutObject", "s3:DeleteObject"])
def test_a_step_changes_its_own_folders_alone(step: str, action: str) -> None:
    """Of all folders of a run, it may write and delete in those of its cluster file."""
    cluster, role = load_cluster(step), role_of(step)
    prefixes = cluster.write_prefixes if action == "s3:PutObject" else cluster.delete_prefixes
    for folder in FOLDERS:
        is_named = any(each in (f"{{run}}/{folder}", "{run}", f"{{{folder}}}") for each in prefixes)
        assert allows(role, Request(action, f"{RUN}/{folder}/a/b")) == is_named, folder


def test_feature_extraction_cannot_touch_models() -> None:
    """It may read selection and audio and write features; models it may neither read nor write."""
    role = role_of("extract_features")
    assert allows(role, Request("s3:GetObject", f"{RUN}/corpus/audio/a.flac"))
    assert allows(role, Request("s3:GetObject", f"{RUN}/selection/labelled/manifest.json"))
    assert allows(role, Request("s3:PutObject", f"{RUN}/features/labelled/manifest.json"))
    for action in ("s3:GetObject", "s3:PutObject", "s3:DeleteObject"):
        assert not allows(role, Request(action, f"{RUN}/models/student/manifest.json"))
    assert not allows(role, Request("s3:ListBucket", "arn:aws:s3:::megahour", "runs/tiny/models/"))
    assert not allows(role, Request("s3:ListBucket", "arn:aws:s3:::megahour", ""))
    assert not allows(role, Request("s3:DeleteObject", f"{RUN}/features/labelled/manifest.json"))


@pytest.mark.parametrize("name", LANGUAGE_MODEL_FILES)
def test_the_graph_is_built_of_each_language_model(name: str) -> None:
    """Every name that ingest may write, and no other file of the corpus beside it."""
    role = role_of(run_table.BUILD_GRAPH)
    prefixes = load_cluster(run_table.BUILD_GRAPH).readable("s3://b/run", "s3://b/corpus")
    assert f"s3://b/corpus/{name}" in prefixes
    assert allows(role, Request("s3:GetObject", f"{RUN}/corpus/{name}"))
    listing = f"runs/tiny/corpus/{name}"
    assert allows(role, Request("s3:ListBucket", "arn:aws:s3:::megahour", listing))
    assert not allows(role, Request("s3:GetObject", f"{RUN}/corpus/{name}.old"))


@pytest.mark.parametrize("step", STEPS)
def test_neighbours_are_out_of_reach(step: str) -> None:
    """Another run, a run whose name begins alike, and another bucket are denied to every step."""
    role = role_of(step)
    others = ("megahour/runs/tiny2", "megahour/runs/other", "megahour2/runs/tiny", "megahour")
    for place in others:
        for action in ("s3:GetObject", "s3:PutObject", "s3:DeleteObject"):
            for folder in FOLDERS:
                assert not allows(role, Request(action, f"arn:aws:s3:::{place}/{folder}/a"))


def test_one_stack_may_serve_all_nights() -> None:
    """With a run prefix of runs/*, a role's folders are those of each run below it."""
    role = role_of("extract_features", {**PLACES, "RunPrefix": "runs/*"})
    other = "arn:aws:s3:::megahour/runs/2026-11-24"
    assert allows(role, Request("s3:PutObject", f"{other}/features/a"))
    assert not allows(role, Request("s3:PutObject", f"{other}/models/a"))


def test_an_absent_object_needs_the_permission_to_list() -> None:
    """S3 answers 403, not 404, without it; every step asks for manifests that may be absent."""
    line = '"GET /megahour/runs/tiny/features/manifest.json HTTP/1.1" 404 -'
    get, listing = logged_requests(line)
    assert get == Request("s3:GetObject", f"{RUN}/features/manifest.json")
    assert listing == Request("s3:ListBucket", "arn:aws:s3:::megahour")
    assert all(allows(role_of(step), listing) for step in STEPS)


def test_a_role_of_your_own_cluster_file(run_job: RunJob, tmp_path) -> None:
    """`megahour roles --step-cluster` takes prefixes from your file; a bad one names the remedy."""
    file = tmp_path / "mine.toml"
    ours = INFRA / "clusters/certify.toml"
    file.write_text(ours.read_text().replace("{run}/certificate", "{run}/mine"))
    said = run_job("roles", "--step-cluster", f"certify={file}")
    assert (said.code, said.err) == (0, "")
    assert "${Bucket}/${RunPrefix}/mine/*" in said.out
    said = run_job("roles", "--step-cluster", "certify=nowhere")
    assert said.code == 2
    assert "roles: cluster 'nowhere': need a path to a .toml file, or one of" in said.err


INTERMEDIATES = {FEATURES_FOLDER, TARGETS_FOLDER, PARTITIONS_FOLDER, LATTICES_FOLDER}
NAMES = ("RunPrefix", "RunPrefix2", "RunPrefix3", "RunPrefix4")


def test_each_run_has_rules_of_its_own() -> None:
    """Those of further runs are there if the user names these, and expire what the first's do."""
    import cfnlint.decode  # noqa: PLC0415 - 2 s, for this test alone

    template: Any
    template, errors = cfnlint.decode.decode(str(INFRA / "cloudformation/storage.yaml"))
    assert errors == []
    assert [each for each in template["Parameters"] if each.startswith("RunPrefix")] == [*NAMES]
    rules = template["Resources"]["Bucket"]["Properties"]["LifecycleConfiguration"]["Rules"]
    for name in NAMES:
        condition = f"HasRun{name.removeprefix('RunPrefix')}"
        named = rules
        if name != NAMES[0]:
            assert template["Conditions"][condition] == {
                "Fn::Not": [{"Fn::Equals": [{"Ref": name}, ""]}]
            }
            named = [
                each["Fn::If"][1] for each in rules if each.get("Fn::If", [""])[0] == condition
            ]
        places = {
            each["Prefix"]["Fn::Sub"]: each["ExpirationInDays"]
            for each in named
            if isinstance(each.get("Prefix"), dict)
        }
        days = {"Ref": "IntermediateDays"}
        assert places == {f"${{{name}}}/{folder}/": days for folder in INTERMEDIATES}
