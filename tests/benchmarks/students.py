"""Train students of the same teacher side by side: of hours, of damaged and of real transcripts.

python -m tests.benchmarks.students hours --kaldi-dir DIR --recipe librispeech --out DIR
python -m tests.benchmarks.students recognizer --kaldi-dir DIR --recipe librispeech --out DIR
python -m tests.benchmarks.students damage --kaldi-dir DIR --recipe recorded --out DIR

`hours` selects less of the unlabelled speech. `recognizer` reads `whisper.jsonl` of the corpus.
`damage` replaces, deletes and inserts words of the unlabelled speakers' transcripts, which then are
what recognizers heard. Each row is a run, DIR/seed_N/ROW, with a corpus of its own, as what was
heard is part of it. All rows take graph, baseline and teacher over from the row `own`, the recipe
as it is (--labelled-from). The oracle is a baseline to which the unlabelled speakers are
transcribed, and `train_clean_5` one to which LibriSpeech's of that subset are; both decode by the
language model that `own` made, and hear its words. By `--placements` each utterance is in several
simulated rooms; `--every 3` keeps a third of each speaker's utterances.

Rows are those that `--rows` names, or all. A command that was cut off continues where it was. A
row's errors by speaker are written to DIR/seed_N/ROW.jsonl, and a row that has this file is not
made again: seeds may be made on several days, and their files collected. All rows that every seed
has are printed as a table, with errors pooled over seeds, and where there are placements as one of
each. Without --kaldi-dir nothing is made:

python -m tests.benchmarks.students recognizer --out DIR
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from infra.settings import Range
from infra.store.object_store import ObjectStore
from jobs.cli.arguments import TRAINING_PLACEMENTS, number_in, recipe_path
from jobs.run import OF_UNLABELLED
from jobs.run_table import CERTIFY, EVALUATE, REPORT, STEPS
from pipeline.runs.manifest import read_manifest, read_output
from pipeline.runs.names import (
    BASELINE,
    BOOTSTRAP_STEP,
    EVALUATION_ERRORS,
    EVALUATION_STEP,
    GRAPH_STEP,
    LEXICON_FILE,
    SCRATCH_FOLDER,
    STUDENT,
    TEACHER,
    sequence_trained,
)
from pipeline.sampling import sampling_priority
from tests.benchmarks.folds import Corpus, Fold
from training.align.labelled import MADE_STATISTIC
from training.decode.lexicon import parse_lexicon
from training.evaluate.scores import Estimate, Resamples, SpeakerCounts, resample
from training.evaluate.word_errors import (
    UtteranceErrors,
    WordErrors,
    read_errors,
    word_errors,
    write_errors,
)
from training.settings.recipe import Recipe, read_recipe
from training.targets.text_normalization import Normalizer

OWN, ORACLE, TRAIN_CLEAN_5, WHISPER_TEXT = "own", "oracle", "train_clean_5", "whisper_text"
TEST_CLEAN = "f0121 f1221 f1580 f4970 f5142 f6829 m1089 m1320 m4077 m5105 m5639 m8224"
TRANSCRIBED = {
    ORACLE: frozenset[str](),
    TRAIN_CLEAN_5: frozenset(TEST_CLEAN.split()),
    WHISPER_TEXT: frozenset[str](),
}
"""Rows of transcribed speech alone, and the unlabelled speakers that they do without.

A row that names a recognizer has what it heard for their transcripts. Of LibriSpeech's, all but
these are of train-clean-5, on whose 28 speakers Kaldi's mini_librispeech trains.
"""

SMBR = sequence_trained("")
RATES = (0, 5, 10, 20, 30)
HOURS = (0.5, 1, 2)
SEEDED = ("aligner", "baseline", "teacher", "student", "targets")
ARPA = "language_model.arpa"
ALL = "all"

FEW_MODELS = (
    "sequence_training.baseline=false",
    "sequence_training.teacher=false",
    "teacher.ensemble=1",
)
"""An evaluation by these settings decodes a student, baseline and first teacher."""

TRANSCRIPTS = ("targets.source='transcripts'", "targets.rounds=1")
"""A model of these targets would align the same words again."""

UNWEIGHTED = (
    "targets.transcripts.tuned=false",
    "targets.transcripts.weight=1.0",
    "targets.transcripts.garbage_cost=1000.0",
)
"""Transcripts as if they were labels: no frame keeps the teacher's own."""

AGREEING = (
    "targets.transcripts.tuned=false",
    "targets.transcripts.agreement=1.0",
    "targets.transcripts.min_confidence=0.6",
)
"""What only one of two recognizers has is garbage."""

SCORED = (
    "targets.transcripts.tuned=false",
    "targets.transcripts.agreement=0.0",
    "targets.transcripts.min_confidence=0.8",
)
"""Utterances are garbage whose tokens have a mean probability below .8, says the recognizer."""

IN_LATTICE = ("targets.transcripts.tuned=false", "targets.transcripts.lattice_agreement=1.0")
"""A frame counts as far as the run's own lattice has the transcript's senones there."""

BOTH = ("targets.transcripts.tuned=false", "targets.transcripts.weight=0.5")
"""Half is of the transcript, half of the run's own teacher."""

Texts = Mapping[str, Sequence[str]]
"""Words by utterance."""


@dataclass(frozen=True, slots=True)
class Damaged:
    """Damaged: the reference, of whose words so many percent are wrong in the way of `draw`."""

    percent: int
    draw: int = 0

    @property
    def name(self) -> str:
        """Return what the recognizer is called."""
        return f"damaged_{self.draw}"


@dataclass(frozen=True, slots=True)
class Heard:
    """Heard: the lines of a file of the corpus, NAME.jsonl."""

    name: str


Recognizer = Damaged | Heard


@dataclass(frozen=True, slots=True)
class Row:
    """Row: a student, and what labels it: recognizers, or without any the run's own teacher."""

    name: str
    recognizers: tuple[Recognizer, ...] = ()
    overrides: tuple[str, ...] = ()


def of_transcripts(name: str, recognizers: Sequence[Recognizer], *overrides: str) -> Row:
    """Return the row of a student of transcripts."""
    return Row(name, tuple(recognizers), (*TRANSCRIPTS, *overrides))


EXPERIMENTS: Mapping[str, tuple[Row, ...]] = {
    "hours": (
        Row(OWN),
        Row(ORACLE),
        *(Row(f"hours_{each:g}", (), (f"selection.hours={each}",)) for each in HOURS),
    ),
    "damage": (
        Row(OWN),
        Row(ORACLE),
        *(of_transcripts(f"labels_{rate}", [Damaged(rate)], *UNWEIGHTED) for rate in RATES),
        *(of_transcripts(f"weighted_{rate}", [Damaged(rate)]) for rate in RATES),
        *(of_transcripts(f"in_lattice_{rate}", [Damaged(rate)], *IN_LATTICE) for rate in RATES),
        *(
            of_transcripts(f"agreeing_{rate}", [Damaged(rate), Damaged(rate, draw=1)], *AGREEING)
            for rate in RATES[1:]
        ),
    ),
    "recognizer": (
        Row(OWN),
        Row(ORACLE),
        Row(TRAIN_CLEAN_5),
        Row(WHISPER_TEXT, (Heard("whisper"),)),
        of_transcripts("reference", [Damaged(0)], *UNWEIGHTED),
        of_transcripts("whisper_labels", [Heard("whisper")], *UNWEIGHTED),
        of_transcripts("whisper", [Heard("whisper")]),
        of_transcripts("scored", [Heard("whisper")], *SCORED),
        of_transcripts("in_lattice", [Heard("whisper")], *IN_LATTICE),
        of_transcripts("both", [Heard("whisper")], *BOTH),
    ),
}


def damaged(words: Sequence[str], vocabulary: Sequence[str], percent: int, seed: int) -> list[str]:
    """Replace, delete or insert a word, each a third of the time, at `percent` of the places.

    New words are drawn from the vocabulary evenly; a replacement is another word.
    """
    generator = np.random.default_rng(seed)
    found = []
    for word in words:
        kind = generator.integers(3) if 100 * generator.random() < percent else None
        drawn = vocabulary[generator.integers(len(vocabulary))]
        while kind == 0 and drawn == word:
            drawn = vocabulary[generator.integers(len(vocabulary))]
        found += {None: [word], 0: [drawn], 1: [], 2: [word, drawn]}[kind]
    return found


@dataclass(frozen=True)
class Experiment:
    """Experiment: a corpus with its fixed speakers, one seed, and the folder of its runs."""

    corpus: Corpus
    fold: Fold
    folder: Path
    seed: int
    recipe: str
    overrides: tuple[str, ...]
    placements: str = ""

    def settings(self, row: Row) -> list[str]:
        """Return the overrides of a row."""
        shared = [f"{section}.seed={self.seed}" for section in SEEDED]
        shared += ["models.normalization='labelled'"]
        shared += [f"corpus.uri='{self.folder.absolute() / f'{row.name}_corpus'}'"]
        shared += [*self.overrides, *row.overrides]
        return [*shared, *(self.of_transcribed(row, shared) if row.name in TRANSCRIBED else ())]

    def of_transcribed(self, row: Row, shared: Sequence[str]) -> Iterator[str]:
        """Yield what gives the baseline as many frames as the student has, and its teacher few."""
        recipe = self.read(shared)
        student = recipe.student
        num_sub_epochs = student.num_passes * student.num_sub_epochs
        hours = student.num_passes * self.corpus.hours(self.fold.unlabelled)
        hours += (
            num_sub_epochs / student.num_labelled_shares * self.corpus.hours(self.fold.labelled)
        )
        if student.warm_start == BASELINE:
            hours += recipe.baseline.num_epochs * self.corpus.hours(self.fold.labelled)
        epochs = round(hours / self.corpus.hours(self.speakers_of(row).labelled))
        whole = round(epochs * student.num_whole_utterance_sub_epochs / num_sub_epochs)
        yield from (
            f"baseline.num_epochs={epochs}",
            f"baseline.num_chunked_epochs={epochs - whole}",
        )
        yield from ("teacher.ensemble=1", "teacher.num_epochs=1", "teacher.num_chunked_epochs=1")
        yield from ("sequence_training.teacher=false", "sequence_training.student=false")
        # The lexicon may have no word of theirs alone.
        yield from ("corpus.unknown_words='letters'", "corpus.num_text_words=0")
        yield from (f"evaluation.arpa='{ARPA}'", "evaluation.language_model_text=''")

    def read(self, overrides: Sequence[str]) -> Recipe:
        """Read the recipe with overrides."""
        return read_recipe(recipe_path(self.recipe), overrides)

    def speakers_of(self, row: Row) -> Fold:
        """Return the speakers as a row hears them."""
        if row.name not in TRANSCRIBED:
            return self.fold
        heard = (each for each in self.fold.unlabelled if each not in TRANSCRIBED[row.name])
        return replace(self.fold, labelled=(*self.fold.labelled, *heard), unlabelled=())

    def run(self, row: Row) -> str:
        """Return the run of a row."""
        return str(self.folder / row.name)

    def commands(self, row: Row) -> Iterator[list[str]]:
        """Yield the commands that make or resume the row's run.

        Where models are taken over, no others than FEW_MODELS are decoded: the table has the
        errors of the row `own` for all but the student.
        """
        steps = [each for each in STEPS if each not in {CERTIFY, REPORT}]
        if row.name in TRANSCRIBED:
            yield self.command(row, [each for each in steps if each not in OF_UNLABELLED])
        elif row.name == OWN:
            yield self.command(row, steps)
        else:
            base = ["--labelled-from", self.run(Row(OWN))]
            yield self.command(row, [each for each in steps if each != EVALUATE], *base)
            few = [part for each in FEW_MODELS for part in ("--set", each)]
            yield self.command(row, [EVALUATE], *base, *few)

    def command(self, row: Row, steps: Sequence[str], *options: str) -> list[str]:
        """Return the command that runs some steps of the row's run."""
        data = self.folder / f"{row.name}_data"
        command = [sys.executable, "-m", "jobs.run", "--recipe", self.recipe]
        command += ["--run", self.run(row), "--kaldi-dir", str(data)]
        command += [TRAINING_PLACEMENTS, self.placements] if self.placements else []
        command += [part for each in steps for part in ("--only", each)]
        for each in row.recognizers if row.name not in TRANSCRIBED else ():
            command += ["--transcripts", f"{each.name}={data / each.name}.jsonl"]
        settings = [part for each in self.settings(row) for part in ("--set", each)]
        return [*command, *settings, *options]

    def write_data(self, row: Row) -> None:
        """Write the row's data directory; the audio remains where it is."""
        data = self.folder / f"{row.name}_data"
        fold = self.speakers_of(row)
        self.corpus_of(row).write(fold, data)
        for subset in (name for name, speakers in fold.subsets().items() if not speakers):
            (data / f"{subset}.speakers").unlink()
        if row.name in TRANSCRIBED:
            (made,) = Path(self.run(Row(OWN)), GRAPH_STEP, SCRATCH_FOLDER).glob("*/arpa-*.arpa")
            shutil.copy(made, data / ARPA)
            self.write_lexicon(data)
        for each in row.recognizers:
            lines = [f"{json.dumps(line)}\n" for line in self.lines(each)]
            (data / f"{each.name}.jsonl").write_text("".join(lines))

    def corpus_of(self, row: Row) -> Corpus:
        """Return the corpus with the transcripts that a row of transcribed speech has."""
        found = copy(self.corpus)
        if row.name in TRANSCRIBED and row.recognizers:
            lexicon = parse_lexicon((self.corpus.folder / LEXICON_FILE).read_text())
            normalizer = Normalizer(lexicon, "en")
            heard = {
                line["utterance_id"]: normalizer.words(line["pred_text"])
                for line in self.lines(row.recognizers[0])
            }
            # An utterance that it did not hear has no text, and not its reference.
            found.text_of = self.corpus.text_of | {key: [] for key in self.references()} | heard
        return found

    def write_lexicon(self, data: Path) -> None:
        """Write the lexicon with the words that `own` pronounced, which all rows then hear."""
        run_uri = self.run(Row(OWN))
        bootstrap = read_manifest(ObjectStore((run_uri,)), run_uri, BOOTSTRAP_STEP)
        made: Mapping[str, Sequence[str]] = bootstrap.statistics.get(MADE_STATISTIC, {})
        lines = [f"{word} {' '.join(phones)}\n" for word, phones in made.items()]
        text = (self.corpus.folder / LEXICON_FILE).read_text().rstrip("\n")
        (data / LEXICON_FILE).write_text(f"{text}\n{''.join(lines)}")

    def lines(self, recognizer: Recognizer) -> list[dict[str, Any]]:
        """Return what a recognizer heard in the unlabelled utterances."""
        unlabelled = self.references()
        if isinstance(recognizer, Heard):
            text = (self.corpus.folder / f"{recognizer.name}.jsonl").read_text()
            lines = [json.loads(line) for line in text.splitlines()]
            return [line for line in lines if line["utterance_id"] in unlabelled]
        vocabulary = sorted(lexicon_words(self.corpus))
        percent, name = recognizer.percent, recognizer.name
        return [
            {
                "utterance_id": key,
                "pred_text": " ".join(
                    damaged(words, vocabulary, percent, sampling_priority(self.seed, name + key))
                ),
            }
            for key, words in unlabelled.items()
        ]

    def references(self) -> Texts:
        """Return the transcripts of the unlabelled speakers."""
        speaker_of = self.corpus.speaker_of
        return {
            key: words
            for key, words in self.corpus.text_of.items()
            if speaker_of[key] in self.fold.unlabelled
        }

    def label_errors(self, row: Row) -> float | None:
        """Return the word error rate of the row's first recognizer, percent; None without one.

        Case and punctuation are no errors here, and digits are.
        """
        if not row.recognizers:
            return None
        heard = {line["utterance_id"]: line["pred_text"] for line in self.lines(row.recognizers[0])}
        references = self.references()
        found = [
            word_errors(plain(" ".join(words)), plain(heard[key]))
            for key, words in references.items()
        ]
        words = sum(map(len, references.values()))
        return 100 * sum(each.errors for each in found) / words

    def measure(self, row: Row) -> None:
        """Write the word errors of the row's models on held-out speech, which its run evaluated."""
        run_uri = self.run(row)
        store = ObjectStore((run_uri,))
        outputs = read_manifest(store, run_uri, EVALUATION_STEP).outputs
        (written,) = [o for o in outputs if Path(o.key).name.startswith(EVALUATION_ERRORS)]
        errors = by_speaker(read_errors(read_output(store, run_uri, written)))
        Measured(self.label_errors(row), errors).write(self.folder / f"{row.name}.jsonl")


def by_speaker(utterances: Sequence[UtteranceErrors]) -> list[UtteranceErrors]:
    """Add up each speaker's utterances, one placement's at a time, under the speaker's id."""
    found: dict[tuple[str, str], UtteranceErrors] = {}
    for each in utterances:
        key = each.speaker_id, each.placement
        before = found.get(key, replace(each, duration_ms=0, errors={}))
        errors = {
            model: before.errors.get(model, WordErrors()) + errors
            for model, errors in each.errors.items()
        }
        duration_ms = before.duration_ms + each.duration_ms
        name = " ".join(filter(None, key))
        found[key] = replace(each, utterance_id=name, duration_ms=duration_ms, errors=errors)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured: the word error rate of a row's labels, percent, and its models' errors by speaker.

    A row without recognizer has no rate. The file has a line for it, and one for each speaker.
    """

    label_errors: float | None
    speakers: Sequence[UtteranceErrors]

    @classmethod
    def read(cls, path: Path) -> "Measured":
        """Read what `write` wrote."""
        about, _, errors = path.read_bytes().partition(b"\n")
        return cls(json.loads(about)["label_errors"], read_errors(errors))

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        about = json.dumps({"label_errors": self.label_errors}).encode()
        beside = path.with_suffix(".part")
        beside.write_bytes(about + b"\n" + write_errors(self.speakers))
        beside.replace(path)


def plain(text: str) -> list[str]:
    """Return the words without case and punctuation."""
    return re.sub(r"[^\w' ]", " ", text.upper()).split()


def named(found: Sequence[UtteranceErrors], model: str, row: str) -> dict[str, UtteranceErrors]:
    """Return the errors of one model alone, under the name of its row, by utterance."""
    return {each.utterance_id: replace(each, errors={row: each.errors[model]}) for each in found}


def pooled(by_seed: Sequence[Mapping[str, Sequence[UtteranceErrors]]]) -> Resamples:
    """Add up, by speaker, the errors of the rows that all seeds have, and draw speakers.

    Baseline and teacher are those of the row `own`, and the oracle is its run's baseline. Models
    after sMBR have rows of their own.
    """
    utterances: list[UtteranceErrors] = []
    for rows in by_seed:
        columns = []
        for stage in ("", SMBR):
            of_own = ((OWN, f"{model}{stage}", f"{model}{stage}") for model in (BASELINE, TEACHER))
            of_rows = (
                (row, f"{BASELINE if row in TRANSCRIBED else STUDENT}{stage}", f"{row}{stage}")
                for row in rows
            )
            columns += [
                named(rows[row], model, name)
                for row, model, name in (*of_own, *of_rows)
                if model in rows[row][0].errors
            ]
        for key, first in columns[0].items():
            errors = {name: e for column in columns for name, e in column[key].errors.items()}
            utterances.append(replace(first, errors=errors))
    return resample(SpeakerCounts.of(utterances))


def table(drawn: Resamples, labels: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """Return a record of each model: the errors of its labels, WER, WERR and recovery, percent.

    Models after sMBR are held against the baseline and the oracle after it.
    """
    records = []
    for name in drawn.errors:
        row = name.removesuffix(SMBR)
        stage = name.removeprefix(row)
        baseline, oracle = f"{BASELINE}{stage}", f"{ORACLE}{stage}"
        record: dict[str, Any] = {"row": name, "label_errors": labels.get(row)}
        record["wer"] = asdict(drawn.word_error_rate(name))
        if name != baseline and baseline in drawn.errors:
            record["werr"] = asdict(drawn.reduction(baseline, name))
        # Where the oracle gains nothing, there is nothing to recover.
        there = {baseline, oracle} <= drawn.errors.keys() and name not in (baseline, oracle)
        if there and drawn.errors[oracle][0] < drawn.errors[baseline][0]:
            record["recovery"] = asdict(drawn.recovery(baseline, name, oracle))
        records.append(record)
    return records


def shown(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the records as a table of Markdown."""
    lines = ["| | labels | WER | WERR | recovery |", "| --- | --- | --- | --- | --- |"]
    for record in records:
        labels = record["label_errors"]
        cells = [record["row"], "" if labels is None else f"{labels:.1f}"]
        for name in ("wer", "werr", "recovery"):
            found = Estimate(**record[name]) if name in record else None
            cells.append(f"{found.value:.1f} ({found.low:.1f}..{found.high:.1f})" if found else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def fixed_fold(kaldi_dir: Path) -> Fold:
    """Read the speakers of each subset."""

    def speakers(subset: str) -> tuple[str, ...]:
        path = kaldi_dir / f"{subset}.speakers"
        return tuple(path.read_text().split()) if path.exists() else ()

    return Fold(*map(speakers, ("labelled", "unlabelled", "heldout", "dev")))


def lexicon_words(corpus: Corpus) -> set[str]:
    """Return the words that have pronunciations."""
    lines = (corpus.folder / LEXICON_FILE).read_text().splitlines()
    return {line.split()[0] for line in lines if line.strip()}


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.students",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--kaldi-dir", type=Path, help="corpus; without it nothing is made")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="librispeech")
    parser.add_argument("--rows", nargs="+", help="rows to make; own is always made")
    parser.add_argument("--seeds", type=int, nargs="+", default=[17, 18, 19])
    parser.add_argument("--every", type=number_in(Range(1, 1000), int), default=1, metavar="N")
    parser.add_argument(TRAINING_PLACEMENTS, default="", metavar="NAMES", help="as of ingest")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args()
    known = [row.name for row in EXPERIMENTS[arguments.experiment]]
    if unknown := {*(arguments.rows or ())} - {*known}:
        parser.error(f"--rows {' '.join(sorted(unknown))}: known: {', '.join(known)}")
    return arguments


def seed_folder(out: Path, seed: int) -> Path:
    """Return where a seed's runs and results are."""
    return out / f"seed_{seed}"


def experiments(arguments: argparse.Namespace) -> list[Experiment]:
    """Return the experiment of each seed."""
    corpus = Corpus(arguments.kaldi_dir, arguments.every)
    fold = fixed_fold(arguments.kaldi_dir)
    return [
        Experiment(
            corpus,
            fold,
            seed_folder(arguments.out, seed),
            seed,
            arguments.recipe,
            tuple(arguments.set),
            arguments.placements,
        )
        for seed in arguments.seeds
    ]


def collected(folders: Sequence[Path], names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the records of the rows that each seed's folder has; none without `own`.

    They are those of ALL utterances, and by placement where there are several.
    """
    complete = [
        name for name in names if all((each / f"{name}.jsonl").exists() for each in folders)
    ]
    if OWN not in complete:
        return {}
    by_seed = [
        {name: Measured.read(each / f"{name}.jsonl") for name in complete} for each in folders
    ]
    labels = {name: each.label_errors for name, each in by_seed[0].items()}
    placements = sorted({each.placement for each in by_seed[0][OWN].speakers})
    found = {}
    for placement in (ALL, *placements) if len(placements) > 1 else (ALL,):
        errors = [
            {
                name: [each for each in row.speakers if placement in (ALL, each.placement)]
                for name, row in rows.items()
            }
            for rows in by_seed
        ]
        found[placement] = table(pooled(errors), labels)
    return found


def main() -> None:
    """Make the rows that are asked for, then print all that is there."""
    arguments = parsed()
    rows = EXPERIMENTS[arguments.experiment]
    chosen = [row for row in rows if row.name in (OWN, *(arguments.rows or [r.name for r in rows]))]
    for each in experiments(arguments) if arguments.kaldi_dir else ():
        for row in chosen:
            if not (each.folder / f"{row.name}.jsonl").exists():
                each.write_data(row)
                for command in each.commands(row):
                    subprocess.run(command, check=True)
                each.measure(row)
    folders = [seed_folder(arguments.out, seed) for seed in arguments.seeds]
    for placement, records in collected(folders, [row.name for row in rows]).items():
        print(f"\n{placement}\n\n{shown(records)}")


if __name__ == "__main__":
    main()
