"""A cluster's package has the same bytes each time, is complete, and works from the zip."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy
import pytest

from infra.cluster import load_cluster
from infra.settings import ConfigurationError
from infra.spark.packaging import closure, write_code, write_dependencies
from jobs.run_table import spark_steps
from pipeline.filterbank.log_mel import is_compiled

INSTALLED = str(Path(numpy.__file__).parents[1])

# What the tasks of Spark steps import: functions travel by reference to these. Each step of a list
# has the dependencies of those before it, and a few more.
TASK_MODULES = (
    {
        "select_utterances": ("pipeline.steps.selection.select",),
        "repartition": ("pipeline.steps.repartition",),
        "ingest": (
            "pipeline.audio.placements",
            "pipeline.steps.ingestion.tables",
            "pipeline.steps.ingestion.ingest_manifests",
            "pipeline.steps.ingestion.lhotse",
            "pipeline.steps.ingestion.placed_audio",
        ),
        "verify": ("pipeline.audit.corpus_objects", "pipeline.audit.stored_objects"),
        "extract_features": ("pipeline.steps.features",),
    },
    {"bootstrap": ("training.align.bootstrap",), "realign": ("training.align.realignment",)},
    {
        "evaluate": ("training.evaluate.heldout", "training.evaluate.tuning"),
        "generate_targets": (
            "pipeline.steps.targets",
            "training.targets.own_teacher",
            "training.targets.teacher",
        ),
    },
)

READ_ALL = """
import json, pipeline, training, jobs, infra
from importlib.metadata import version
from importlib.resources import files
from infra.cluster import load_cluster
from jobs.cli.job import read_recipe, recipe_path
print(json.dumps({
    "places": [package.__file__ for package in (pipeline, training, jobs, infra)],
    "version": version("megahour"),
    "cluster": load_cluster("demo").master,
    "recipe": read_recipe(recipe_path("demo")).name,
    "style": len(files("jobs.report_page").joinpath("style.css").read_text()),
}))
"""


def run_isolated(program: str, *path: str, folder: Path) -> str:
    """Run `program` with these places to import from, without the checkout."""
    command = [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {path!r}\n{program}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_code(tmp_path_factory.mktemp("dist"))


def test_the_same_code_gives_the_same_zip(code: Path, tmp_path: Path) -> None:
    """Names are sorted and times fixed, so the package's digest identifies it."""
    assert write_code(tmp_path).read_bytes() == code.read_bytes()


def test_the_code_runs_from_the_zip(code: Path, tmp_path: Path) -> None:
    """Clusters, recipes, styles and the version that manifests record are found inside it."""
    found = json.loads(run_isolated(READ_ALL, str(code), INSTALLED, folder=tmp_path))
    assert all(place.startswith(f"{code}/") for place in found["places"])
    assert f"megahour-{found['version']}.zip" == code.name
    assert (found["cluster"], found["recipe"]) == ("local[2]", "demo")
    assert found["style"] > 0


@pytest.mark.parametrize("modules", TASK_MODULES)
def test_tasks_import_only_what_their_cluster_file_lists(
    modules: dict[str, tuple[str, ...]], code: Path, tmp_path: Path
) -> None:
    """The dependencies named in the step's cluster file, and theirs, are all that tasks need.

    They bring no module that only a driver has.
    """
    program, linked = "import sys\n", set[str]()
    for step, needed_modules in modules.items():
        needed = closure(load_cluster(step).python_dependencies)
        assert linked <= needed.keys()
        (tmp_path / step).mkdir()
        for each in (needed[name] for name in needed.keys() - linked):
            for top_level in {file.parts[0] for file in each.files or ()} - {"..", "__pycache__"}:
                (tmp_path / step / top_level).symlink_to(each.locate_file(top_level))
        linked |= needed.keys()
        program += f"sys.path.append({str(tmp_path / step)!r})\n"
        program += f"import {', '.join(needed_modules)}\n"
    imported = run_isolated(f"{program}print(*sys.modules)", str(code), folder=tmp_path).split()
    assert {"jobs", "infra.cluster", "packaging", "pyspark"}.isdisjoint(imported)


def test_each_spark_step_is_among_them() -> None:
    """And `verify`, whose tasks run on Spark, too."""
    assert {step for each in TASK_MODULES for step in each} == {*spark_steps(), "verify"}


def test_the_same_versions_give_the_same_archive(tmp_path: Path) -> None:
    """The same versions give one name and the same bytes; an existing file is not written again."""
    first, second = (write_dependencies(["tqdm>=4"], _made(tmp_path / name)) for name in ("a", "b"))
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()
    modified = first.stat().st_mtime_ns
    assert write_dependencies(["tqdm>=4"], first.parent).stat().st_mtime_ns == modified


def test_an_archive_holds_importable_packages_and_no_more(code: Path, tmp_path: Path) -> None:
    """The unpacked archive can be imported, with versions; it has no scripts and no bytecode.

    It has the compiled libraries too: none can be loaded from the zip.
    """
    with tarfile.open(write_dependencies(["jaxtyping"], tmp_path)) as archive:
        names = archive.getnames()
        archive.extractall(tmp_path / "unpacked")  # Python 3.11.2 knows no filter
    assert not [name for name in names if ".." in name or "__pycache__" in name]
    unpacked = str(tmp_path / "unpacked")
    program = (
        "import jaxtyping; from importlib.metadata import version; print(version('wadler-lindig'))"
    )
    said = run_isolated(program, unpacked, folder=tmp_path)
    assert said.strip() == closure(["jaxtyping"])["wadler-lindig"].version
    program = "from pipeline.filterbank.log_mel import is_compiled; print(is_compiled())"
    said = run_isolated(program, str(code), unpacked, INSTALLED, folder=tmp_path)
    assert said.strip() == str(is_compiled())


def test_the_clusters_own_packages_stay_out() -> None:
    """pyspark stays out, as it must fit the cluster's JVM; extras and markers are followed."""
    assert closure(["pyspark"]) == {}
    assert "cryptography" not in closure(["urllib3"])


@pytest.mark.parametrize(
    ("requirement", "problem"),
    [
        ("no-such-thing>=1", "no-such-thing>=1 (requested): not installed"),
        ("numpy>=99", r"numpy>=99 (requested): 2"),
    ],
)
def test_what_is_not_installed_cannot_be_packed(requirement: str, problem: str) -> None:
    """The message names the requirement, the distribution that needs it, and the remedy."""
    with pytest.raises(ConfigurationError) as caught:
        closure([requirement])
    assert problem in str(caught.value)
    assert f"pip install '{requirement}'" in str(caught.value)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
