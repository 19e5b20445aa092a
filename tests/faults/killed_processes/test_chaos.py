"""No killed process, of any kind, at any moment, changes a byte of the outcome."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.killed_processes.chaos import STEP_LIMIT_S, Chaos, Record, struck_steps
from tests.faults.killed_processes.chaos_run import Undisturbed
from tests.faults.killed_processes.killer import Killer
from tests.faults.killed_processes.packaged_steps import PACKAGED, PackagedSteps, prepare
from tests.s3_server import fresh_bucket, running_s3_server
from tests.standalone_cluster import running_cluster
from tests.whole_path.processes import REPOSITORY

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

PLACES = ("local", "s3")


@dataclass(frozen=True)
class Setting:
    """Setting is what the tests share: the packaged steps on a cluster, an undisturbed run, S3."""

    steps: PackagedSteps
    undisturbed: Undisturbed
    bucket: str
    s3_log: Path


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    folder = tmp_path_factory.mktemp("chaos")
    s3_log = folder / "s3.log"
    with running_s3_server(s3_log) as endpoint, pytest.MonkeyPatch.context() as patch:
        bucket = fresh_bucket(endpoint, patch)
        undisturbed = Undisturbed.make(folder / "undisturbed")
        with running_cluster(folder / "cluster") as cluster:
            yield Setting(prepare(folder, cluster), undisturbed, bucket, s3_log)


def test_driver_and_executors_run_from_the_package(setting: Setting) -> None:
    """Code comes from the zip, NumPy from the unpacked archive, nothing from the checkout."""
    program = str(Path(__file__).with_name("import_places.py"))
    process = setting.steps.start_from_archive(program)
    log = setting.steps.log(PACKAGED)
    assert process.wait(STEP_LIMIT_S) == 0, log.read_text()[-4000:]
    found = json.loads(log.read_text().splitlines()[-1])
    code = Path(setting.steps.package.code)
    assert all(place.startswith(f"{code}/") for place in found["driver"])
    for *ours, numpy, threads, python in found["tasks"]:
        assert threads == "1", "whatever its host has"
        assert all(f"/{code.name}/" in place for place in ours)
        assert re.search(r"/worker-\d/app-[^/]+/\d+/dependencies/numpy/", numpy)
        assert Path(python).is_relative_to(setting.steps.folder / "bare")
        assert not any(Path(place).is_relative_to(REPOSITORY) for place in (*ours, numpy))


@pytest.mark.parametrize("place", [pytest.param("local", marks=pytest.mark.chaos), "s3"])
def test_no_death_changes_a_byte(
    setting: Setting, place: str, request: pytest.FixtureRequest
) -> None:
    """Manifests equal an undisturbed run's, all digests match, each utterance is there once.

    --kills N processes are killed in each place: with 5, in extraction and target generation.
    """
    num_kills = request.config.getoption("--kills")
    runs = str(setting.steps.folder / "runs") if place == "local" else f"s3://{setting.bucket}"
    record = Record(struck_steps(num_kills))
    chaos = Chaos(setting.steps, setting.undisturbed, Killer(PLACES.index(place)), record)
    chaos.run(num_kills, runs)
    print(record.table())
    refused = re.findall('" 412 ', setting.s3_log.read_text())
    print(f"commits to S3 that found another attempt's: {len(refused)}")
    assert record.different == []
    assert record.stray == []
    assert record.kills.total() >= num_kills
    assert record.has_all_kinds()
