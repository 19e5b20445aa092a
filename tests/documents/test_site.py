"""The documentation site has every page and source that is linked, and no link that leads nowhere.

`make docs`, a part of `make lint`, builds the whole site; here the hook builds small ones.
"""

import re
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

import training.trainers
from tests.documents.document_commands import ROOT

FOUND = {
    "README.md": '[guide](docs/guide.md#two-words), <img src="docs/a.svg"/> and [code](infra/a.py)',
    "docs/guide.md": "# Guide\n\n## Two words\n\n[back](../README.md)",
    "docs/a.svg": "<svg/>",
    "infra/a.py": "A = 1",
}


def built(folder: Path, **pages: str) -> Path:
    """Build a strict site of files of a repository with these texts; return its folder."""
    for name, text in {**FOUND, **pages}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "mkdocs.yml").write_text(f"site_name: x\nhooks: [{ROOT}/docs/site_pages.py]\n")
    config = load_config(
        str(folder / "mkdocs.yml"), strict=True, use_directory_urls=False, plugins=[]
    )
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    return folder / "site"


def test_pages_and_what_they_link_have_their_paths_in_the_repository(tmp_path: Path) -> None:
    """A README is its folder's index, so that links to a folder lead to it, too."""
    site = built(tmp_path)
    for name in ("index.html", "docs/guide.html", "docs/a.svg", "infra/a.py"):
        assert (site / name).is_file(), name
    assert 'href="docs/guide.html#two-words"' in (site / "index.html").read_text()


@pytest.mark.parametrize(
    "text",
    [
        "[a page](docs/gone.md)",
        "[a section](docs/guide.md#three-words)",
        "[a source](infra/gone.py)",
        '<img src="docs/gone.svg"/>',
        '<a href="docs/guide.html#three-words">a section</a>',
    ],
)
def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path, text: str) -> None:
    """Of Markdown or of HTML, to a page, a section, a source or a picture."""
    with pytest.raises(Abort, match="strict mode"):
        built(tmp_path, **{"README.md": text})


def test_every_trainer_is_in_the_reference() -> None:
    """With its settings: a new trainer is documented."""
    page = (ROOT / "docs/reference/trainers.md").read_text()
    described = set(re.findall(r"^::: training\.trainers\.(\w+)$", page, re.M))
    assert described == set(training.trainers.__all__)
    settings = set(re.findall(r"^ +- (\w+)$", page, re.M))
    trainers = (getattr(training.trainers, name) for name in described - {"Trainer"})
    assert {each.record.__name__ for each in trainers} <= settings
