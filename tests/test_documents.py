"""The documents name what exists: paths, modules, commands, links, examples, figures and tests."""

import ast
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import soundfile

from docs.figures.data_flow import pictures
from jobs.cli.megahour import STORY
from tests.training.forked_programs import Program, run_forked

ROOT = Path(__file__).parents[1]
PACKAGES = ("pipeline", "training", "jobs", "infra")
PAGES = sorted(path for part in ("*.md", "running/*.md") for path in (ROOT / "docs").glob(part))
GUIDES = [
    *sorted(path for name in (*PACKAGES, "tests") for path in (ROOT / name).rglob("*.md")),
    *PAGES,
]
DECISIONS = sorted((ROOT / "docs/decisions").glob("0*.md"))
# The change log names what there was, and so do measured results: finished studies left the tree.
RESULTS = [ROOT / "tests/benchmarks/RESULTS.md", *(ROOT / "tests/benchmarks/results").glob("*.md")]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "GLOSSARY.md", "CONTRIBUTING.md", "SECURITY.md")),
    ROOT / "docs/decisions/README.md",
    *DECISIONS,
    *(guide for guide in GUIDES if guide not in RESULTS),
]
# Folders and files of a run, of a user's corpus, or of another system, not of the repository.
ELSEWHERE = re.compile(
    r"(runs|selection|features|corpus|report|certificate|conf|scratch|dist)/"
    r"|(manifest|report)\.json|(example|inspect|my_ctc|my_models|my_teachers)\.py|spark-env\.sh"
    r"|(data|clips)/|(mine|emr|emr_serverless|databricks|dataproc|kubernetes|slurm)\.toml"
)
# Names of other software, and of the Makefile.
FOREIGN = {
    "ATEN_CPU_CAPABILITY",
    "EnforceNotMet",
    "KALDI_DIR",
    "ParakeetForCTC",
    "WAV2VEC2_ASR_BASE_960H",
    "Wav2Vec2ForCTC",
    "avg_logprob",
    "connectFullMesh",
    "do_normalize",
    "imagePullSecrets",
    "objectViewer",
    "secretAccessor",
    "predict_batch_udf",
}
NOT_INSTALLED = re.compile(r"(import|from) (faster_whisper|nemo)\b")
"""Other people's packages in examples, which no extra installs."""

WORD = re.compile(r"\b(?:[A-Za-z]\w*_\w+|\w*[a-z][A-Z]\w*)\b")
PATH = re.compile(r"[\w.-]+(/[\w.-]+)*(/|\.(py|md|toml|ipynb|cff|c|svg|sh))")


def text_of(document: Path) -> str:
    """The document's text; its name shows in a failure."""
    return document.read_text(encoding="utf-8")


def named(document: Path) -> str:
    """The document's path below the repository: the name of its test."""
    return str(document.relative_to(ROOT))


def prose_of(document: Path) -> str:
    """The document without its blocks of code, and without a comparison's column of other tools."""
    outside = re.sub(r"^```.*?^```", "", text_of(document), flags=re.M | re.S)
    return (
        re.sub(r"^\|.*?\|", "", outside, flags=re.M) if "| there | here |" in outside else outside
    )


def named_paths(document: Path) -> set[str]:
    """The paths that a document has in `code`, or hands to spark-submit or torchrun."""
    text, outside = text_of(document), prose_of(document)
    spans = [span for span in re.findall(r"`([^`\n]+)`", outside) if PATH.fullmatch(span)]
    submitted = re.findall(r"(?:spark-submit|--) (jobs/\w+\.py)", text)
    return {span for span in [*spans, *submitted] if not ELSEWHERE.match(span)}


def is_found(path: str, document: Path) -> bool:
    """Whether a path lies below the root, the document's folder, or a package that it describes."""
    return any((folder / path).exists() for folder in (ROOT, document.parent))


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_named_paths_exist(document: Path) -> None:
    """Every path in a document is a file or folder of the repository."""
    missing = {path for path in named_paths(document) if not is_found(path, document)}
    assert missing == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_named_modules_exist(document: Path) -> None:
    """Every module after -m in a document can be found, ours and others'."""
    modules = set(re.findall(r"(?<![\w-])-m ([a-z_]\w*(?:\.\w+)*)", text_of(document)))
    missing = {module for module in modules if importlib.util.find_spec(module) is None}
    assert missing == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_named_targets_and_jobs_exist(document: Path) -> None:
    """Every `make TARGET` is in the Makefile, every `megahour JOB` is a command."""
    code = re.findall(r"^```sh\n(.*?)^```|`(.+?)`", text_of(document), re.M | re.S)
    commands = "\n".join(fenced or span for fenced, span in code)
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"^make ([a-z]+)", commands, re.M)) <= targets
    jobs = {name for chapter in STORY.values() for name in chapter}
    assert set(re.findall(r"^megahour ([a-z_]+)", commands, re.M)) <= jobs


@pytest.fixture(scope="module")
def code_words() -> set[str]:
    """Every word of the code, its settings and its tests, and the names of their files."""
    folders = [ROOT / name for name in (*PACKAGES, "tests", "docs")]
    paths = [path for folder in folders for path in folder.rglob("*")]
    words = {path.stem for path in paths}
    for path in [*paths, ROOT / "pyproject.toml"]:
        if path.suffix in {".py", ".toml", ".c"}:
            words.update(re.findall(r"\w+", text_of(path)))
    return words


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_named_identifiers_exist(document: Path, code_words: set[str]) -> None:
    """Every identifier in `code`, known by its _ or inner capital, occurs in the repository."""
    outside = prose_of(document)
    words = {word for span in re.findall(r"`([^`\n]+)`", outside) for word in WORD.findall(span)}
    assert words - code_words - FOREIGN == set()


@pytest.mark.parametrize("document", [*DOCUMENTS, *RESULTS, ROOT / "CHANGELOG.md"], ids=named)
def test_links_resolve(document: Path) -> None:
    """Every relative link and picture of a document leads to a file."""
    links = re.findall(r"\]\(([^)#\s]+)|(?:src|srcset)=\"([^\"]+)\"", text_of(document))
    relative = {link for pair in links for link in pair if link and "://" not in link}
    assert {link for link in relative if not (document.parent / link).exists()} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_examples_import_what_exists(document: Path) -> None:
    """Every name that a document's Python example imports from us is there."""
    blocks = re.findall(r"^```py(?:thon)?\n(.*?)^```", text_of(document), re.M | re.S)
    for node in (node for block in blocks for node in ast.walk(ast.parse(block))):
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        if is_import and not NOT_INSTALLED.match(ast.unparse(node)):
            exec(ast.unparse(node), {})  # an ImportError is the failure


@pytest.mark.parametrize(
    "name", ["pipeline", "infra", "jobs", "training", "training/decode", "training/export"]
)
def test_package_examples_run(name: str, tmp_path: Path) -> None:
    """A guide's examples run as they are, one after the other, on a second of noise."""
    noise = 0.1 * np.random.default_rng(0).standard_normal(16_000)
    soundfile.write(tmp_path / "utterance.flac", noise, 16_000)
    blocks = re.findall(r"^```python\n(.*?)^```", text_of(ROOT / name / "README.md"), re.M | re.S)
    assert blocks
    program = "".join(blocks).replace("/tmp/mine", str(tmp_path / "mine"))
    (tmp_path / "example.py").write_text(program)
    (done,) = run_forked([Program(tmp_path / "example.py", (), tmp_path)])
    assert done.code == 0, done.err


def test_figures_are_what_their_script_draws() -> None:
    """The picture's files hold the bytes that docs/figures/data_flow.py makes."""
    assert {path: path.read_bytes() for path in pictures()} == {
        path: picture.encode() for path, picture in pictures().items()
    }


def test_decisions_have_one_form_and_are_listed() -> None:
    """Each decision has a number, a title and three parts; the index lists each by its title."""
    titles = {}
    for path in DECISIONS:
        title, *parts = text_of(path).rstrip("\n").split("\n\n")
        titles[path.name] = title.removeprefix("# ")
        assert title.startswith(f"# {path.name[:4]} "), path.name
        assert [part.split(" ")[0] for part in parts] == ["**Decision.**", "**Why.**", "**Cost.**"]
    assert len({name[:4] for name in titles}) == len(titles)
    index = re.findall(
        r"^- \[(.*)\]\((0.*?\.md)\)$", text_of(ROOT / "docs/decisions/README.md"), re.M
    )
    assert sorted((name, title) for title, name in index) == sorted(titles.items())


def test_glossary_defines_each_word_once_with_its_source() -> None:
    """Each entry ends with its source, a paper's section or "ours"; no word has two entries."""
    text = text_of(ROOT / "GLOSSARY.md")
    entries = [
        " ".join(entry.split()) for entry in re.findall(r"^- (.*?)(?=^- |^$)", text, re.M | re.S)
    ]
    words = [re.match(r"\*\*(.+?)\*\*", entry)[1] for entry in entries]
    assert len(words) == len(set(words))
    source = re.compile(r"\((00[0-4] |ours).*\)$")
    assert [entry for entry in entries if not source.search(entry)] == []


def test_citation_names_the_four_papers() -> None:
    """And no version, which pyproject.toml alone states."""
    citation = text_of(ROOT / "CITATION.cff")
    assert re.findall(r"^version:", citation, re.M) == []
    assert len(re.findall(r"^  - type:", citation, re.M)) == 4


def test_other_documents_name_the_threat_model() -> None:
    """SECURITY.md and the README do."""
    for name in ("SECURITY.md", "README.md"):
        assert "(docs/threat_model.md)" in text_of(ROOT / name)
