"""The hook of mkdocs.yml: the site's pages are the repository's Markdown where it lies.

Each page has its path in the repository, so that links between pages are those of the repository.
Pictures and sources that a page links are files of the site, too. Links that lead nowhere are
warnings, which fail a strict build; nothing is fetched.
"""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import chain
from pathlib import Path
from urllib.parse import unquote, urldefrag

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files

FOLDERS = ("docs", "infra", "jobs", "notebooks", "pipeline", "tests", "training")
LINK = re.compile(r"\]\(([^)#\s]+)|\b(?:src|srcset)=\"([^\"]+)\"")
log = get_plugin_logger(__name__)


def root_of(config: MkDocsConfig) -> Path:
    """Return the repository's root, where mkdocs.yml lies."""
    assert config.config_file_path is not None
    return Path(config.config_file_path).resolve().parent


def linked(page: Path) -> Iterator[Path]:
    """Yield the files, other than pages, that a page links or shows."""
    for link in filter(None, chain(*LINK.findall(page.read_text(encoding="utf-8")))):
        path = (page.parent / link).resolve()
        if "://" not in link and path.suffix != ".md" and path.is_file():
            yield path


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Put the repository's pages, and what they link, in place of the files of `docs_dir`."""
    root = root_of(config)
    pages = [*root.glob("*.md")]
    for folder in FOLDERS:
        pages += (root / folder).rglob("*.md")
    paths = {*pages, *chain.from_iterable(map(linked, pages))}
    ours = [
        File(str(path.relative_to(root)), str(root), config.site_dir, use_directory_urls=False)
        for path in sorted(paths)
    ]
    theme = [file for file in files if file.src_dir != config.docs_dir]
    return Files([*theme, *ours])


class _Links(HTMLParser):
    """The links of a built page, and the names that others may link in it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.names: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, _tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect a tag's links and its name."""
        values = {name: value for name, value in attrs if value}
        self.links.update(values[name] for name in ("href", "src", "srcset") if name in values)
        self.names.update(values[name] for name in ("id", "name") if name in values)


def on_post_build(*, config: MkDocsConfig) -> None:
    """Warn of each link of a built page whose file or anchor is not in the site."""
    site = Path(config.site_dir).resolve()
    pages = {page: _Links(page) for page in sorted(site.rglob("*.html"))}
    for page, found in pages.items():
        if page.name == "404.html":  # its links are those of a server's root
            continue
        for link in sorted(found.links):
            path, anchor = urldefrag(link)
            if re.match(r"[a-z]+:|//", path):
                continue
            target = (page.parent / unquote(path)).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            is_named = not anchor or target not in pages or anchor in pages[target].names
            if not (target.is_file() and is_named):
                log.warning("%s: %s leads nowhere", page.relative_to(site), link)
