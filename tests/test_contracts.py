"""The house rules that hold for the whole source: who may import what, recipes."""

import ast
from functools import cache
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from beartype.roar import BeartypeCallHintParamViolation

from infra.cluster import load_cluster
from infra.store.object_store import ObjectStore, join_uri
from infra.store.uris import require_within
from jobs.cli.arguments import recipe_path
from jobs.run import launches
from jobs.run_table import STEPS, written_steps
from pipeline.runs.manifest import manifest_uri
from pipeline.runs.names import EVALUATED_MODELS
from pipeline.splicing import splice
from tests.source_trees import REPOSITORY, dotted, imported, trees
from training.settings.recipe import read_recipe


@cache
def used_names() -> dict[str, frozenset[str]]:
    """Each file's dotted names of modules, of names from them, and of attributes that are read."""
    return {
        str(file): frozenset(
            (
                *(name for _, name in imported(tree)),
                *(dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)),
            )
        )
        for file, tree in trees().items()
    }


def users(*names: str) -> set[str]:
    """Files that import or name one of the dotted `names`, or something in them."""
    return {
        file
        for file, found in used_names().items()
        for used in found
        if any(used == name or used.startswith(f"{name}.") for name in names)
    }


def test_arrays_of_another_shape_are_refused_in_tests() -> None:
    """tests/conftest.py has the annotations of every call checked, in each of xdist's workers."""
    with pytest.raises(BeartypeCallHintParamViolation, match="frames bins"):
        splice(np.zeros(9, np.float32), 0)


def test_only_infra_reads_the_environment() -> None:
    """Configuration comes from recipes and arguments; elsewhere nothing reads variables."""
    readers = users("os.environ", "os.environb", "os.getenv", "os.getenvb", "dotenv")
    assert {file for file in readers if not file.startswith("infra/")} == set()


def test_only_trainers_know_other_ranks() -> None:
    """process_group, rank_launcher, simulated_group and trainers alone import torch.distributed."""
    known = users("torch.distributed", "torch.multiprocessing")
    trainers = {file for file in known if file.startswith("training/trainers/")}
    assert known - trainers == {
        "training/distributed/process_group.py",
        "training/distributed/rank_launcher.py",
        "training/distributed/simulated_group.py",
    }


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "jobs" / "recipes").glob("*.toml")), ids=lambda path: path.stem
)
def test_our_recipes_can_be_read(path: Path) -> None:
    """Every recipe has all keys and no other, is named after its file, and its cluster is there."""
    recipe = read_recipe(str(path))
    assert recipe.name == path.stem
    if recipe.cluster:
        load_cluster(recipe.cluster)


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "infra" / "clusters").glob("*.toml")), ids=lambda path: path.stem
)
def test_our_clusters_can_be_read(path: Path) -> None:
    """Every cluster has all keys and no other, by path as by name."""
    assert load_cluster(str(path)) == load_cluster(path.stem)


@pytest.mark.parametrize(
    "step", [launch.step for launch in launches(["--kaldi-dir", "data"], 2, 4)]
)
def test_every_steps_cluster_permits_what_the_step_does(step: str) -> None:
    """Its manifests lie within its own cluster's prefixes; what it writes, within the writable."""
    described = import_module(f"jobs.{step}").STEP
    assert described.name == step
    most = ["alignment.rounds=2", "targets.source='lattice'"]
    most += [f"sequence_training.{name}=true" for name in EVALUATED_MODELS]
    recipe = read_recipe(recipe_path("demo"), most)
    cluster = load_cluster(step)
    run_uri, corpus_uri = "s3://bucket/run", "s3://bucket/corpus"
    read = ObjectStore(cluster.readable(run_uri, corpus_uri))
    written = ObjectStore(cluster.writable(run_uri, corpus_uri))
    for name in STEPS[step].reads(recipe):
        require_within(manifest_uri(run_uri, name), read.allowed_prefixes)
    for name in written_steps(recipe, step):
        require_within(manifest_uri(run_uri, name), written.allowed_prefixes)
    require_within(join_uri(run_uri, "steps", f"{step}.json"), written.allowed_prefixes)
