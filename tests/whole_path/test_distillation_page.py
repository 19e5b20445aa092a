"""The commands of docs/distillation.md, one after the other, on a small corpus with a recognizer.

The steps run in this process, and their Spark tasks in a plain loop; the teacher's server is real.
"""

import json
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

import jobs.run
from infra.settings import canonical_json
from infra.store.object_store import ObjectStore
from jobs.cli import spark_steps
from jobs.cli.megahour import module_of
from pipeline.runs.manifest import read_manifest
from tests.documents.document_commands import ROOT, commands_of
from tests.job_programs import RunJob, Said, exit_code
from tests.small_corpus import flac, plain_loop
from tests.training.decode.toy_language import LEXICON_TXT
from tests.whole_path.processes import TINY
from tests.whole_path.test_own_teacher_run import SENTENCES, spoken

PAGE = ROOT / "docs" / "distillation.md"
COMMANDS = [command for command in commands_of(PAGE) if command.job]

SIZES = {"labelled": (4, 12), "unlabelled": (3, 8), "heldout": (1, 3)}
MISHEARD = "unlabelled2-3"
"""The utterance in which the recognizer heard words that the lexicon lacks."""

UNHEARD = "unlabelled2-4"
"""The utterance of which it says nothing."""

LEARNING = (
    "student.trainer={name = 'synchronous'}",
    "teacher.trainer={name = 'synchronous'}",
    "alignment.rounds=1",
    *("bootstrap.num_iterations=12", "bootstrap.max_hours=0"),
    *("aligner.num_epochs=8", "teacher.num_epochs=8", "teacher.num_chunked_epochs=4"),
)
"""What the tiny recipe lacks to align these tones."""


def written(text: str) -> str:
    """The text as a recognizer writes it."""
    return f"{text[0].upper()}{text[1:]}."


def write_data(folder: Path) -> None:
    """Write what the page says one needs."""
    (folder / "audio").mkdir(parents=True)
    heard, count = [], 0
    for subset, (num_speakers, num_each) in SIZES.items():
        lines = []
        for speaker in range(num_speakers):
            for number in range(num_each):
                name = f"{subset}{speaker}-{number}"
                text = SENTENCES[(number + speaker) % len(SENTENCES)]
                samples = spoken(text, seed=count)
                count += 1
                (folder / "audio" / f"{name}.flac").write_bytes(flac(samples))
                path = f"audio/{name}.flac"
                line = {"audio_filepath": path, "duration": len(samples) / 16_000}
                line |= {"speaker": f"{subset}{speaker}"}
                if subset == "unlabelled":
                    named = {"audio_filepath": path}
                    if speaker == 0:
                        line["utterance_id"] = name
                        named = {"utterance_id": name}
                    said = "Hallelujah" if name == MISHEARD else written(text)
                    if name != UNHEARD:
                        heard.append({**named, "pred_text": said, "score": -0.1})
                else:
                    line["text"] = text
                lines.append(line)
        write_lines(folder / f"{subset}.jsonl", lines)
    write_lines(folder / "whisper.jsonl", heard)
    (folder / "lexicon.txt").write_text(LEXICON_TXT)


def write_lines(path: Path, lines: Sequence[dict[str, object]]) -> None:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def settings_of_page() -> list[str]:
    """The recipe's lines on the page, as overrides of the tiny recipe."""
    (block,) = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    sections = tomllib.loads(block)
    return [
        f"{section}.{key}={canonical_json(value)}"
        for section, keys in sections.items()
        for key, value in keys.items()
    ]


def run_script() -> None:
    """Run the page's last program, which writes what the recognizer heard as text."""
    scripts = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    exec(scripts[-1], {})


def test_the_page_leads_from_audio_and_transcripts_to_words(
    tmp_path: Path,
    run_job: RunJob,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each command ends well; what has no aligned transcript is counted, by its reason."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(spark_steps, "distribute_on_spark", plain_loop)
    monkeypatch.setattr(jobs.run, "run_steps", run_in_process)
    write_data(tmp_path / "data")
    (tmp_path / "mine.toml").write_text(TINY.read_text())
    (tmp_path / "speech.flac").write_bytes(flac(spoken("sake a bee", seed=99)))
    overrides = [part for each in (*settings_of_page(), *LEARNING) for part in ("--set", each)]
    run_script()
    said: dict[str, list[Said]] = {}
    for command in COMMANDS:
        name, arguments = command.job or ("", ())
        assert name, command
        given = (*arguments, *overrides) if "--recipe" in arguments else arguments
        if name == "run":
            found = whole_run(given, monkeypatch, capsys)
        else:
            found = run_job(module_of(name), *given)
        assert found.code == 0, f"{command}: {found.err[-3000:]}"
        said.setdefault(name, []).append(found)
    assert [*said] == ["check", "run", "inspect", "verify", "export", "transcribe"]
    mine, text = (str(tmp_path / "runs" / name) for name in ("mine", "text"))
    store = ObjectStore((mine, text))
    made = read_manifest(store, mine, "targets/unlabelled")
    assert made.tally_out.utterances == 3 * 8
    assert made.statistics["without_transcript"] == {"no_transcript": 1, "unknown_words": 1}
    assert "no_transcript" in said["inspect"][0].out
    wers = [
        json.loads(Path(run_uri, "report", "report.json").read_text())["wer"]
        for run_uri in (mine, text)
    ]
    assert wers[0]["student"]["all"] < wers[0]["baseline"]["all"]
    # The utterance of which the recognizer says nothing is no transcript.
    assert (
        read_manifest(store, text, "features/labelled").tally_out.utterances == 4 * 12 + 3 * 8 - 1
    )
    assert "student" not in wers[1]
    given = ("--recipe", "mine.toml", "--run", text, "--model", "baseline", "--out", "text.zip")
    assert run_job(module_of("export"), *given, *overrides).code == 0
    given = [part for part in COMMANDS[-3].words[2:] if part != "models.normalization=labelled"]
    refused = whole_run([part for part in given if part != "--set"], monkeypatch, capsys)
    assert refused.code == 2
    assert "no --manifest of unlabelled speech, and models.normalization = 'all'" in refused.err


def whole_run(
    given: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Said:
    """Call `megahour run` with these arguments, in this process."""
    monkeypatch.setattr(sys, "argv", ["run", *given])
    with pytest.raises(SystemExit) as ended:
        jobs.run.main()
    return Said(int(ended.value.code or 0), *capsys.readouterr())


def run_in_process(steps: Sequence[jobs.run.Launch], shared: Sequence[str]) -> int:
    """Run the steps as `megahour run` does, in this process."""
    for launch in steps:
        if code := exit_code(launch.step, *shared, *launch.arguments):
            return code
    return 0
