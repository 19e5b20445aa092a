"""Mistakes that a run would find after hours are reported before its first step."""

import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from infra.store import retry
from infra.store.object_store import ObjectStore
from jobs.cli import host
from jobs.cli.arguments import recipe_path
from pipeline.audit.step_records import list_run
from pipeline.runs.increment import Bases, record_bases
from pipeline.runs.names import LANGUAGE_MODEL_FILES
from pipeline.steps.ingestion.placed_audio import PlacementChoice
from tests.documents.document_commands import ROOT, commands_of
from tests.infra.store.quirky_s3 import QuirkySettings, quirky_s3
from tests.job_programs import RunJob, Said
from tests.s3_server import set_endpoint
from tests.small_corpus import write_kaldi_tables
from tests.whole_path.processes import TINY
from training.models import precision
from training.settings.recipe import read_recipe

LEXICON = "A AH S\nB B IY\nC AH S B IY\n"
PASSWORD = "hunter/2"


@pytest.fixture
def kaldi_dir(tmp_path: Path) -> Path:
    write_kaldi_tables(tmp_path, LEXICON)
    return tmp_path


def require_refusal(said: Said, *parts: str) -> None:
    """Require exit code 2 and one line that holds `parts`."""
    assert (said.code, said.out) == (2, ""), said
    (line,) = said.err.splitlines()
    for part in parts:
        assert part in line


def check(run_job: RunJob, *options: str) -> Said:
    return run_job("check", "--recipe", str(TINY), "--run", "runs/x", *options)


def test_all_is_well(run_job: RunJob, kaldi_dir: Path) -> None:
    """One line, or one JSON object, or nothing; nothing is written."""
    ranks = ("--supervised-ranks", "3", "--student-ranks", "4", "--kaldi-dir", str(kaldi_dir))
    assert check(run_job, *ranks) == Said(0, "check: tiny: all is well\n", "")
    assert check(run_job, *ranks, "--quiet") == Said(0, "", "")
    found = json.loads(check(run_job, *ranks, "--json").out)
    assert found["ranks"] == {"aligner": 3, "baseline": 3, "teacher": 3, "student": 4}
    assert not Path("runs/x").exists()


def test_transcripts_are_looked_at_before(run_job: RunJob, kaldi_dir: Path, tmp_path: Path) -> None:
    """Targets of transcripts need some; lines that no run could read are named."""
    given = ("--kaldi-dir", str(kaldi_dir), "--set", "targets.source=transcripts")
    require_refusal(check(run_job, *given), "there are none: give --transcripts NAME=URI")
    lines = tmp_path / "w.jsonl"
    heard = ("--transcripts", f"w={lines}")
    lines.write_text('{"audio": "x.wav", "pred_text": "a"}\n')
    require_refusal(check(run_job, *given, *heard), "no line of the first 1000 is usable")
    lines.write_text('{"utterance_id": "x", "pred_text": "a"}\n')
    assert check(run_job, *given, *heard).code == 0
    (kaldi_dir / "unlabelled.speakers").unlink()
    labelled_alone = ("--set", "models.normalization=labelled")
    assert check(run_job, *given, *labelled_alone).code == 0


def test_a_host_without_bfloat16_is_known_before(
    run_job: RunJob, kaldi_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its CPU trains in float32; that some hosts have it is no note."""
    bfloat16 = ("--set", "student.precision=bfloat16", "--kaldi-dir", str(kaldi_dir))
    monkeypatch.setattr(precision, "has_bfloat16", lambda _: False)
    said = check(run_job, *bfloat16)
    assert said.code == 0
    assert "check: student: precision = 'bfloat16': trained in float32, as cpu" in said.err
    monkeypatch.setattr(precision, "has_bfloat16", lambda _: True)
    assert check(run_job, *bfloat16).err == ""


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--student-ranks", "3"), ("student: trainer: group_size = 2: need a divisor of 3",)),
        (
            ("--student-ranks", "2", "--set", "student.trainer.block_learning_rate=1.5"),
            ("student: trainer: momentum_constant = 1.0: need at least",),
        ),
        (("--set", "teacher.trainer.momentum_constant=0.1"), ("teacher: trainer: momentum",)),
        (("--set", "baseline.minibatch_frames=-1"), ("minibatch_frames = -1: need 1..10000000",)),
        (
            ("--set", "models.teacher.num_layers=100", "--set", "models.teacher.num_units=16384"),
            ("teacher: a model of ", "parameters needs ", "this host: name a smaller"),
        ),
        (("--set", "targets.k=61"), ("k = 61: need at most senones.max_senones = 60",)),
        (("--cluster", "moon"), ("cluster 'moon'",)),
        (("--run", f"{__file__}/run"), (f"{__file__}: a file, not a folder: name another place",)),
        (("--kaldi-dir", "nowhere"), ("--kaldi-dir nowhere is not a directory",)),
        (("--run", f"s3://me:{PASSWORD}@bucket/x"), ("a user, password or port",)),
        (("--run", f"https://me:{PASSWORD}@host/x"), ("https://***: unknown scheme",)),
        (("--run", "s3:/bucket/x"), ("s3:/bucket/x: ", "need s3://bucket/key")),
        (("--manifest", "s3:/bucket/m.jsonl"), ("s3:/bucket/m.jsonl: ", "need s3://bucket/key")),
        (("--manifest", "dev=s3:/bucket/m.jsonl"), ("need s3://bucket/key",)),
        (("--manifest", "m.jsonl", "--lexicon", "s3:/b/l"), ("s3:/b/l: ", "need s3://bucket/key")),
        (("--set", "corpus.uri=s3:/bucket/c"), ("s3:/bucket/c: ", "need s3://bucket/key")),
        (("--set", 'corpus.audio_prefixes=["s3:/b"]'), ("s3:/b: ", "need s3://bucket/key")),
    ],
)
def test_what_cannot_be_done_is_named(
    run_job: RunJob, options: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    """The exit code is 2; the message names the values and the bound, and no password."""
    said = check(run_job, *options)
    require_refusal(said, *parts)
    assert PASSWORD not in said.err


@pytest.mark.parametrize(("option", "value"), [("student", "0"), ("supervised", "1025")])
def test_numbers_of_ranks_are_bounded(run_job: RunJob, option: str, value: str) -> None:
    """Exit code 2, with the usage, the value and the bound."""
    said = check(run_job, f"--{option}-ranks", value)
    assert said.code == 2
    assert said.err.splitlines()[-1].endswith(f"--{option}-ranks: {value}: need 1..1024")


@pytest.fixture
def in_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[QuirkySettings]:
    """Let s3://bucket be in a store whose quirks a test sets."""
    monkeypatch.setattr(retry, "MAX_ASKS", 1)
    with quirky_s3() as (endpoint, settings):
        set_endpoint(endpoint, monkeypatch)
        yield settings


def test_a_store_is_tried_before_a_run(run_job: RunJob, in_s3: QuirkySettings) -> None:
    """Without conditional writes no run could be exactly-once; a run can begin after its check."""

    def said() -> Said:
        return run_job("check", "--recipe", str(TINY), "--run", "s3://bucket/x")

    in_s3.refusal = (403, "AccessDenied")
    denied = said()
    assert denied.code == 0
    assert "check: the store was not tried, as each step will do: s3://bucket/x/" in denied.err
    in_s3.refusal, in_s3.ignores_condition = (0, ""), True
    require_refusal(said(), "need conditional writes")
    in_s3.ignores_condition = False
    assert said() == Said(0, "check: tiny: all is well\n", "")
    store = ObjectStore(("s3://bucket",))
    recorded = record_bases(store, "s3://bucket/x", "s3://bucket/w", "all")
    assert recorded == Bases(("s3://bucket/w",))
    listing = list_run(store, "s3://bucket/x", "s3://bucket/c")
    assert set(listing.other_keys) == listing.note_keys == listing.keys


def test_senones_must_cover_the_phones(run_job: RunJob, kaldi_dir: Path) -> None:
    """Silence is a phone too; as many senones as phones are enough."""
    directory = ("--kaldi-dir", str(kaldi_dir), "--set", "targets.k=3")
    said = check(run_job, *directory, "--set", "senones.max_senones=4")
    require_refusal(said, "max_senones = 4: need at least 5, one for each phone")
    assert check(run_job, *directory, "--set", "senones.max_senones=5").code == 0


def test_a_lexicon_that_is_none_is_named(run_job: RunJob, kaldi_dir: Path) -> None:
    """Its line is named, before anything is copied."""
    (kaldi_dir / "lexicon.txt").write_text("A AH\nB\n")
    said = check(run_job, "--kaldi-dir", str(kaldi_dir))
    require_refusal(said, "lexicon.txt: lexicon line 2: 'B' has no phones")


ARPA = """\\data\\
ngram 1=4
ngram 2=1

\\1-grams:
-1 <s> -0.5
-1 A -0.2
-1 B
-1 </s>

\\2-grams:
-0.3 A B

\\end\\
"""


@pytest.mark.parametrize(
    ("setting", "data", "parts"),
    [
        ("arpa", None, ("'language_model.arpa': ", "is no file: put it there, or name the URI")),
        ("arpa", ARPA.replace("2-grams", "3-grams"), ("ARPA line 11: ", "need \\2-grams: here")),
        ("arpa", ARPA[:-8], ("ends without \\end\\: it was cut off: write or copy it again",)),
        ("arpa", ARPA.lower(), ("no word of lexicon.txt: need the lexicon's spelling",)),
        ("arpa", ARPA.replace("A", "\xc4").encode("latin-1"), ("line 7 is not UTF-8: convert it",)),
        ("language_model_text", None, ("'language_model.txt': ", "is no file: put it there")),
        ("language_model_text", "a b\n", ("a text without any word of lexicon.txt",)),
        ("language_model_text", "\n", ("a text without any word of lexicon.txt",)),
        ("language_model_text", b"A\n\x1f\x8b", ("line 2 is not UTF-8: convert it",)),
    ],
)
def test_a_language_model_that_evaluation_cannot_use_is_named(
    run_job: RunJob, kaldi_dir: Path, setting: str, data: str | bytes | None, parts: tuple[str, ...]
) -> None:
    """Its setting, what is wrong and the remedy are named, hours before it is decoded with."""
    name = "language_model.arpa" if setting == "arpa" else "language_model.txt"
    if data is not None:
        (kaldi_dir / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    said = check(run_job, "--kaldi-dir", str(kaldi_dir), "--set", f"evaluation.{setting}={name!r}")
    require_refusal(said, f"evaluation.{setting} = ", *parts)


def test_words_that_no_hypothesis_can_have_are_counted(run_job: RunJob, kaldi_dir: Path) -> None:
    """Of an ARPA and of a text; --quiet says so too, as the run would not know otherwise."""
    (kaldi_dir / "language_model.arpa").write_text(ARPA)
    (kaldi_dir / "language_model.txt").write_text("A B\nAB A\nBA AB\n")
    directory = ("--kaldi-dir", str(kaldi_dir), "--quiet", "--set")
    said = check(run_job, *directory, "evaluation.arpa='language_model.arpa'")
    assert (said.code, said.out) == (0, "")
    assert "'language_model.arpa': 1 of the 3 words of lexicon.txt are not in it" in said.err
    said = check(run_job, *directory, "evaluation.language_model_text='language_model.txt'")
    assert (said.code, said.out) == (0, "")
    assert "'language_model.txt': 3 of its words are not in lexicon.txt, and" in said.err
    letters = ("--set", "corpus.unknown_words='letters'", "--set", "corpus.num_text_words=1")
    said = check(
        run_job, *directory, "evaluation.language_model_text='language_model.txt'", *letters
    )
    assert ": 1 of its words are not in lexicon.txt or among the 1 that letters" in said.err


def test_a_language_model_of_another_place_is_read_there(
    run_job: RunJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of the prefixes it is refused; in the corpus it is looked for once there is one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.arpa").write_text(ARPA)
    own = ("--set", f"evaluation.arpa={str(tmp_path / 'own.arpa')!r}")
    require_refusal(check(run_job, *own), "evaluation.arpa = ", "outside the allowed prefixes")
    allowed = ("--set", f"corpus.audio_prefixes=[{str(tmp_path)!r}]")
    assert check(run_job, *own, *allowed).code == 0
    (tmp_path / "own.arpa").write_text(ARPA[:-8])
    require_refusal(check(run_job, *own, *allowed), "own.arpa: ARPA text ends without")
    ingested = ("--set", "evaluation.arpa='language_model.arpa'")
    assert check(run_job, *ingested).code == 0
    corpus = Path("runs/x/corpus")
    corpus.mkdir(parents=True)
    (corpus / "lexicon.txt").write_text(LEXICON)
    require_refusal(check(run_job, *ingested), "evaluation.arpa = ", "language_model.arpa")
    (corpus / "language_model.arpa").write_text(ARPA)
    assert check(run_job, *ingested).code == 0


@pytest.mark.parametrize("name", LANGUAGE_MODEL_FILES)
def test_what_ingest_copies_build_graph_may_read(
    run_job: RunJob, kaldi_dir: Path, name: str
) -> None:
    """By the steps' own cluster files, as hours_1m has them; another name is refused at once."""
    is_arpa = ".arpa" in name
    text = (ARPA if is_arpa else "A B\n").encode()
    (kaldi_dir / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    setting = "arpa" if is_arpa else "language_model_text"
    options = ("--kaldi-dir", str(kaldi_dir), "--set", "cluster=''", "--set")
    said = check(run_job, *options, f"evaluation.{setting}={name!r}")
    assert said.code == 0, said.err
    said = check(run_job, *options, f"evaluation.{setting}='own-{name}'")
    require_refusal(said, f"evaluation.{setting} = 'own-{name}': ", "outside the allowed prefixes")


@pytest.fixture
def beside_manifests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Options of a manifest of transcribed speech, in a folder with a lexicon and a model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text(LEXICON)
    (tmp_path / "labelled.jsonl").write_text('{"audio_filepath": "a.flac", "text": "A B"}\n')
    (tmp_path / "own.arpa.gz").write_bytes(gzip.compress(ARPA.encode()))
    for name in ("labelled", "day"):
        (tmp_path / "runs/x").mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs/x" / f"{name}.wav").touch()
        line = {"audio_filepath": f"runs/x/{name}.wav", "duration": 1.0, "text": "A"}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line))
    return "--manifest", "labelled=labelled.jsonl", "--manifest", "day.jsonl"


def test_transcripts_need_a_lexicon(run_job: RunJob, beside_manifests: tuple[str, ...]) -> None:
    """Beside manifests, and in a corpus that is there; alignment would ask hours later."""
    given = (*beside_manifests, "--lexicon", "words.txt")
    said = check(run_job, *beside_manifests)
    require_refusal(said, "runs/x/corpus/lexicon.txt is absent, and transc", "give --lexicon URI")
    assert check(run_job, *given).code == 0
    said = check(run_job, *given, "--set", "senones.max_senones=4", "--set", "targets.k=3")
    require_refusal(said, "max_senones = 4: need at least 5, one for each phone")
    Path("words.txt").write_text("A AH\nB\n")
    require_refusal(check(run_job, *given), "words.txt: lexicon line 2: 'B' has no phones")
    said = check(run_job, *beside_manifests, "--lexicon", "absent.txt")
    require_refusal(said, "--lexicon ", "absent.txt: no such object")
    metadata = Path("runs/x/corpus/metadata/labelled/date=2020-01-01/speaker_bucket=00/a.jsonl")
    metadata.parent.mkdir(parents=True)
    metadata.write_text("{}\n")
    require_refusal(check(run_job, "--ingested"), "lexicon.txt is absent, ", "put Kaldi's lexicon")
    require_refusal(check(run_job, *beside_manifests[2:]), "lexicon.txt is absent", "give --lexic")
    Path("runs/x/corpus/lexicon.txt").write_text(LEXICON)
    assert check(run_job, "--ingested").code == check(run_job, *beside_manifests).code == 0


def test_a_manifest_that_ingest_cannot_use(
    run_job: RunJob, beside_manifests: tuple[str, ...]
) -> None:
    """It is refused here, in ingest's words, until it is ingested; also what no task could read."""
    given = (*beside_manifests, "--lexicon", "words.txt")
    for text, said in (
        ('{"id": "m", "tracks": []}', "looks like lhotse's mixtures of cuts: give --format lhotse"),
        ('{"audio_filepath": "b.wav", "text": "A"}', "b.wav: no such object"),
    ):
        Path("day.jsonl").write_text(text)
        require_refusal(check(run_job, *given), "day.jsonl", said)
    require_refusal(check(run_job, *given, "--format", "kaldi"), "wav.scp: missing; need wav.scp")


def test_a_variable_that_spark_cannot_use(run_job: RunJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is in the message, and no step starts."""
    for name in ("SPARK_HOME", "PYSPARK_PYTHON", "JAVA_HOME", "TMPDIR"):
        with monkeypatch.context() as environment:
            environment.setenv(name, "/absent")
            require_refusal(check(run_job), f"{name} = /absent: no ")


def test_a_language_model_beside_manifests_is_read_first(
    run_job: RunJob, beside_manifests: tuple[str, ...]
) -> None:
    """It is read where it is, over the lexicon; one that no setting names would be of no use."""
    given = (*beside_manifests, "--lexicon", "words.txt", "--language-model", "own.arpa.gz")
    use = ("--set", "evaluation.arpa='language_model.arpa.gz'")
    said = check(run_job, *given, *use)
    assert said.code == 0
    assert "'language_model.arpa.gz': 1 of the 3 words of lexicon.txt are not in it" in said.err
    remedy = "the recipe does not use it: set evaluation.arpa = 'language_model.arpa.gz'"
    require_refusal(check(run_job, *given), f"--language-model own.arpa.gz: {remedy}")
    said = check(run_job, *given[:-2], *use)
    require_refusal(said, "/language_model.arpa.gz is absent: give --language-model URI")
    said = check(run_job, *given[:-1], "own.bin", *use)
    require_refusal(said, "own.bin: need a name that ends with one of .txt, .arpa, .txt.gz, .arpa")
    Path("own.arpa.gz").write_bytes(gzip.compress(ARPA[:-8].encode()))
    require_refusal(check(run_job, *given, *use), "own.arpa.gz: ARPA text ends without")


def test_a_driver_must_fit_into_this_host(run_job: RunJob, tmp_path: Path) -> None:
    """A local master's memory is that of the host, which is named; an instance's is its own."""
    demo = (Path(__file__).parents[2] / "infra" / "clusters" / "demo.toml").read_text()
    own = tmp_path / "own.toml"
    own.write_text(demo.replace('driver_memory = "1g"', 'driver_memory = "30t"'))
    require_refusal(check(run_job, "--cluster", str(own)), "driver_memory = '30t': need at most")
    own.write_text(
        demo.replace('driver_memory = "1g"', 'driver_memory = "500g"')
        .replace('"local[2]"', '"yarn"')
        .replace('instance_type = "local"', 'instance_type = "p3.16xlarge"')
    )
    said = check(run_job, "--cluster", str(own))
    require_refusal(said, "driver_memory = 512000 MB: need at most 499712 MB, the memory of p3.16x")


def test_a_local_cluster_s_devices_must_be_here(run_job: RunJob, tmp_path: Path) -> None:
    """A GPU that this host has not is named; so is a prefix that keeps a step from writing."""
    demo = (Path(__file__).parents[2] / "infra" / "clusters" / "demo.toml").read_text()
    own = tmp_path / "own.toml"
    own.write_text(demo.replace('"cpu#1"', '"cuda:99"'))
    require_refusal(check(run_job, "--cluster", str(own)), "devices: 'cuda:99' is not on this host")
    own.write_text(
        demo.replace('write_prefixes = ["{corpus}", ', 'write_prefixes = ["s3://other/x"]#')
    )
    require_refusal(
        check(run_job, "--cluster", str(own)),
        "ingest: write_prefixes of its cluster file lack ",
        "runs/x/ingest",
    )


@pytest.mark.parametrize("program", ["run", "demo"])
@pytest.mark.parametrize(
    "options",
    [
        ("--run", f"s3://me:{PASSWORD}@bucket/x"),
        ("--run", "runs/x", "--set", f"corpus.uri=https://me:{PASSWORD}@host/corpus"),
        ("--run", "runs/x", "--surplus", f"https://host/x?X-Amz-Signature={PASSWORD}"),
    ],
)
def test_a_run_shows_no_password(
    run_job: RunJob, monkeypatch: pytest.MonkeyPatch, program: str, options: tuple[str, ...]
) -> None:
    """Neither its messages nor another process's command line hold it: none is started."""
    monkeypatch.setattr("subprocess.Popen", None)
    said = run_job(program, "--recipe", str(TINY), "--kaldi-dir", "nowhere", *options)
    assert said.code == 2
    assert "***" in said.err
    assert PASSWORD not in said.err + said.out


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
def test_a_gpu_that_is_absent_is_refused_before_a_run(run_job: RunJob) -> None:
    """The sentence has the choice and the remedies; auto and cpu train on this host's CPU."""
    require_refusal(check(run_job, "--device", "cuda"), "--device cuda: need a GPU, found none: ")
    assert check(run_job, "--device", "cpu").code == check(run_job).code == 0


def test_ranks_are_checked_against_gpus(run_job: RunJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of three GPUs trains the student on two ranks, not on four."""
    monkeypatch.setattr(host, "_GPU_FILES", ("null",))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    said = check(run_job, "--student-ranks", "4")
    require_refusal(said, "--device auto: 4 ranks on this host: need at most 3, one for each GPU")
    assert check(run_job, "--student-ranks", "2").code == 0
    assert check(run_job, "--student-ranks", "4", "--device", "cpu").code == 0


DEMO_CLUSTER = Path(__file__).parents[2] / "infra" / "clusters" / "demo.toml"
OWN = (
    '{name = "factory", factory = "tests.training.models.own_models:Float32Alone", look_ahead = 0}'
)


def check_own_model(run_job: RunJob, section: str, *settings: str) -> Said:
    options = [part for each in (f"models.{section}={OWN}", *settings) for part in ("--set", each)]
    return run_job("check", "--recipe", str(TINY), "--run", "runs/x", *options)


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        ("student", ["sequence_training.student=true", "sequence_training.precision=bfloat16"]),
        ("teacher", ["targets.rounds=2", "student.precision=bfloat16"]),
        ("teacher", ["teacher.precision=bfloat16"]),
    ],
)
def test_a_model_of_float32_alone_is_refused(
    run_job: RunJob, section: str, settings: list[str]
) -> None:
    """It trains in float32; sMBR, a later round or a GPU's labels in bfloat16 would fail."""
    assert check_own_model(run_job, section, *settings[:-1]).code == 0
    said = check_own_model(run_job, section, *settings)
    assert said.code == 2
    assert f"models: {section}: " in said.err
    assert "in bfloat16: RuntimeError: expected m1 and m2 to have the same dtype" in said.err


@pytest.mark.parametrize(
    ("instance", "section", "is_well"),
    [
        ("g5.48xlarge", "teacher", False),
        ("g5.48xlarge", "student", True),
        ("p3.16xlarge", "teacher", True),
    ],
)
def test_a_teacher_that_gpus_ask_is_tried_in_bfloat16(
    run_job: RunJob, tmp_path: Path, instance: str, section: str, is_well: bool
) -> None:
    """A10Gs label in it, and V100s in float32; the student's form labels nothing."""
    gpus = tmp_path / "gpus.toml"
    gpus.write_text(
        DEMO_CLUSTER.read_text()
        .replace('"local[2]"', '"yarn"')
        .replace('instance_type = "local"', f'instance_type = "{instance}"')
        .replace('["cpu#0", "cpu#1"]', '"auto"')
        .replace("write_prefixes", 'delete_prefixes = ["{run}"]\nwrite_prefixes')
    )
    said = check_own_model(run_job, section, f'cluster="{gpus}"')
    assert (said.code == 0) is is_well, said
    assert is_well or f"models: {section}: frames" in said.err


SHIPPED = sorted(path.stem for path in (ROOT / "jobs" / "recipes").glob("*.toml"))
HELP = ", ".join(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_is_checked(run_job: RunJob, tmp_path: Path, name: str) -> None:
    """All is well on two ranks, as for a run on this host; the help of jobs names the recipe."""
    write_kaldi_tables(tmp_path, "A AH\nB B IY\n")
    if text := read_recipe(recipe_path(name)).evaluation.language_model_text:
        (tmp_path / text).write_bytes(gzip.compress(b"A B\n"))
    given = ("--recipe", name, "--run", str(tmp_path / "run"), "--kaldi-dir", str(tmp_path))
    ranks = ("--supervised-ranks", "2", "--student-ranks", "2")
    said = run_job("check", *given, *ranks)
    assert (said.code, said.out) == (0, f"check: {name}: all is well\n"), said.err
    assert HELP in " ".join(run_job("check", "--help").out.split())


EVERY_PLACEMENT = "clean,DP1,DP2,DP3,DP4,DP5"


def test_readme_runs_what_was_measured() -> None:
    """Its line for own speech has the rotation's placements, recipe, ranks and dev share."""
    (words,) = [
        each.words
        for each in commands_of(ROOT / "README.md")
        if each.job and each.job[0] == "run" and "--placements" in each.words
    ]
    given = dict(itertools.pairwise(words))
    known = EVERY_PLACEMENT.split(",")[1:]
    named = PlacementChoice.parse(given["--placements"], known)
    drawn = PlacementChoice.parse(f"6:{EVERY_PLACEMENT}", known)
    for seed in range(5):
        assert named.of("an4-1", seed) == drawn.of("an4-1", seed) == EVERY_PLACEMENT.split(",")
    assert (given["--recipe"], given["--dev-share"]) == ("placements", "0.2")
    assert given["--supervised-ranks"] == given["--student-ranks"] == "1"
