"""What a release is made of: the version's one place, its notes, and the workflow's scripts."""

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.source_trees import REPOSITORY

SCRIPTS = REPOSITORY / ".ci"
WORKFLOW = yaml.safe_load((REPOSITORY / ".github/workflows/release.yml").read_text())


def run(script: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script of .ci in a folder."""
    command = [str(SCRIPTS / script), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_notes_are_the_version_s_section(tmp_path: Path) -> None:
    """Of a version without a section, or of another that begins like it, there are none."""
    log = "# Changelog\n\n## [0.2.0] - 2027\n\n- new\n\n### Fixed\n- b\n\n## [0.1.0]\n\n- first\n"
    (tmp_path / "CHANGELOG.md").write_text(log)
    assert run("release_notes", "0.2.0", folder=tmp_path).stdout == "\n- new\n\n### Fixed\n- b\n"
    assert run("release_notes", "0.1.0", folder=tmp_path).stdout == "\n- first\n"
    absent = run("release_notes", "0.2", folder=tmp_path)
    assert absent.returncode == 1
    assert "no section '## [0.2]'" in absent.stderr


def test_urls_are_of_the_repository_that_publishes(tmp_path: Path) -> None:
    """They are added to a file that is still TOML."""
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    assert run("project_urls", "https://host/one/two", folder=tmp_path).returncode == 0
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Source"] == "https://host/one/two"


def test_only_a_tag_publishes() -> None:
    """Nothing else pushes images or gets a token, and the package index needs no stored secret."""
    jobs = WORKFLOW["jobs"]
    of_tags = "github.ref_type == 'tag'"
    (push,) = (each["with"] for each in jobs["images"]["steps"] if "push" in each.get("with", {}))
    assert push["push"] == f"${{{{ {of_tags} }}}}"
    assert {name for name, job in jobs.items() if "id-token" in job.get("permissions", {})} == {
        "publish"
    }
    assert jobs["publish"]["if"] == of_tags
    assert {*jobs["publish"]["needs"]} == jobs.keys() - {"publish"}


@pytest.mark.parametrize("extra", ["spark", "train", "demo", "deploy"])
def test_extras_that_messages_name_exist(extra: str) -> None:
    """And nothing that an extra adds is among what every installation has."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert extra in extras
    assert not {*project["dependencies"]} & {each for some in extras.values() for each in some}
