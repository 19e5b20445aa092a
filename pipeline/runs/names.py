"""The names of a run's steps, which are their folders below the run, and of files in them."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

LABELLED, UNLABELLED, HELDOUT = "labelled", "unlabelled", "heldout"
SUBSETS = (LABELLED, UNLABELLED, HELDOUT)
"""The parts of a corpus: transcribed, untranscribed, and transcribed for evaluation alone."""

DEV = "dev"
"""The development speakers: transcribed, for choices alone. A corpus may have none."""

ALL_SUBSETS = (*SUBSETS, DEV)

ALIGNER, BASELINE, TEACHER, STUDENT = "aligner", "baseline", "teacher", "student"
EVALUATED_MODELS = (BASELINE, TEACHER, STUDENT)
ORACLE = "oracle"
"""The name that a report gives to the baseline of a run whose unlabelled speech is transcribed."""

# Folders of the steps that are made for several subsets or models.
SELECTION_FOLDER = "selection"
FEATURES_FOLDER = "features"
TARGETS_FOLDER = "targets"
PARTITIONS_FOLDER = "partitions"
ALIGNMENTS_FOLDER = "alignments"
LATTICES_FOLDER = "lattices"
GRAPHS_FOLDER = "graphs"
MODELS_FOLDER = "models"

INGEST_STEP = "ingest"
PLACEMENTS_SETTING = "placements"
UNKNOWN_WORDS_SETTING = "unknown_words"
"""The setting of ingest, if it simulated placements, that names them by subset."""
DEV_SHARE_SETTING, MANIFESTS_SETTING = "dev_share", "manifests"
"""Settings of ingest, if it drew development speakers or read manifests: share, SUBSET=URI."""
BOOTSTRAP_STEP = f"{ALIGNMENTS_FOLDER}/bootstrap"
TARGETS_STEP = f"{TARGETS_FOLDER}/{UNLABELLED}"
GRAPH_STEP = f"{GRAPHS_FOLDER}/decoding"
"""The step that builds the graph of all searches, and the grammars that rescore their lattices."""
TARGETS_TUNING_STEP = f"{GRAPHS_FOLDER}/tuning"
"""The step that chooses the settings of lattice targets' search by the development speakers."""
PARTITIONS_STEP = f"{PARTITIONS_FOLDER}/{UNLABELLED}"
CERTIFICATE_STEP = "certificate"
CERTIFICATE_DOCUMENT = f"{CERTIFICATE_STEP}/certificate.json"
TUNING_STEP = "tuning"
EVALUATION_STEP = "evaluation"
EVALUATION_SCORES = "scores"
"""The name of the evaluation's output with rates and counts, among those for other tools."""
EVALUATION_ERRORS = "errors"
"""The name of its output with the word errors of each utterance."""
KBEST_COSTS_STEP = "kbest_costs"
"""The step that measures what the targets' k costs; runs that were evaluated before have none."""
REPORT_STEP = "report"
REPORT_DOCUMENT = f"{REPORT_STEP}/report.json"
REPORT_PAGE = f"{REPORT_STEP}/report.html"

# Within a step's folder.
MANIFEST_FILE = "manifest.json"
COMMITS_FOLDER = "commits"
SCRATCH_FOLDER = "scratch"
CHECKPOINTS_FOLDER = "checkpoints"
LEDGER_SUFFIX = ".ledger.jsonl"
PART_SUFFIX = ".outputs"
"""Of an object that lists some outputs of a step whose manifest is too long for one object."""

MISSING_OBJECT: Final = "missing_object"
ACCESS_DENIED: Final = "access_denied"
"""Reasons in a ledger for audio that was not there, and may be there later."""

OUTSIDE_PREFIXES: Final = "outside_prefixes"
"""The reason in a ledger for audio that the recipe does not allow to read."""

# Within a run, beside the steps; and within a corpus.
STEP_RECORDS_FOLDER = "steps"
PLAN_DOCUMENT = "plan/plan.json"
PLAN_CALIBRATION = "plan/calibration.json"
CORPUS_FOLDER = "corpus"
METADATA_FOLDER = "metadata"
AUDIO_FOLDER = "audio"
ACOUSTICS_FOLDER = "acoustics"  # rooms and noises of simulated placements
LEXICON_FILE = "lexicon.txt"

COMMAND_LINE_SETTINGS = ("num_ranks", "num_steps", "num_sub_epochs")
"""Settings of a certificate that its command line gives, and no recipe."""

LANGUAGE_MODEL_FILES = (
    *("language_model.txt", "language_model.arpa"),
    *("language_model.txt.gz", "language_model.arpa.gz"),
)
"""The names in a corpus of language models that ingest writes; evaluation may read each."""

LANGUAGE_MODEL_SETTINGS = ("arpa", "language_model_text")
"""Settings of an evaluation that name a file; its digest is an input of the same name."""


def selection_step(subset: str) -> str:
    """Name the step that selects the utterances of `subset`."""
    return f"{SELECTION_FOLDER}/{subset}"


def features_step(subset: str) -> str:
    """Name the step that extracts the features of `subset`."""
    return f"{FEATURES_FOLDER}/{subset}"


def alignment_step(subset: str) -> str:
    """Name the step that aligns the transcripts of `subset` by a network."""
    return f"{ALIGNMENTS_FOLDER}/{subset}"


ALIGNMENT_STEP = alignment_step(LABELLED)
DEV_ALIGNMENT_STEP = alignment_step(DEV)


def model_step(name: str) -> str:
    """Name the step that trains the model `name`."""
    return f"{MODELS_FOLDER}/{name}"


@dataclass(frozen=True, slots=True)
class RealignmentRound:
    """RealignmentRound is round `number`, from 1, of `total`: a network, and its alignment.

    The last one's have the plain names, as later steps read them.
    """

    number: int
    total: int

    @property
    def aligner(self) -> str:
        """The model that realigns."""
        return ALIGNER if self.number == self.total else f"{ALIGNER}_{self.number}"

    @property
    def reads(self) -> str:
        """The alignments that the model is trained on."""
        return earlier_alignment(self.number - 1) if self.number > 1 else BOOTSTRAP_STEP

    @property
    def writes(self) -> str:
        """The alignments that the model makes."""
        return ALIGNMENT_STEP if self.number == self.total else earlier_alignment(self.number)


def realignment_rounds(total: int) -> list[RealignmentRound]:
    """Return so many rounds of realignment, in order."""
    return [RealignmentRound(number, total) for number in range(1, total + 1)]


def earlier_alignment(number: int) -> str:
    """Name the step of a round of realignment that another round follows."""
    return f"{ALIGNMENTS_FOLDER}/round_{number}"


def alignment_steps(num_rounds: int) -> tuple[str, ...]:
    """Name the steps of alignment in order: the bootstrap, then each round's model and senones."""
    rounds = realignment_rounds(num_rounds)
    return (
        BOOTSTRAP_STEP,
        *(s for each in rounds for s in (model_step(each.aligner), each.writes)),
    )


def lattices_step(name: str) -> str:
    """Name the step that decodes the labelled data to lattices by the model `name`."""
    return f"{LATTICES_FOLDER}/{name}"


def sequence_trained(name: str) -> str:
    """Name the model that sequence training makes of the model `name`."""
    return f"{name}_smbr"


def teachers(ensemble: int, first: str = TEACHER) -> tuple[str, ...]:
    """Name an ensemble's teachers; the first has the name that a single one has.

    A run that trains none, as the teacher is the user's own, has an ensemble of 0.
    """
    return (first, *(f"{first}_{number}" for number in range(2, ensemble + 1)))[:ensemble]


def section_of(model: str) -> str:
    """Return the recipe's section of a model: teacher, of teacher_2 and of teacher_2_smbr."""
    return model.partition("_")[0]


@dataclass(frozen=True, slots=True)
class TargetsRound:
    """TargetsRound is round `number`, from 1, of `total`: teachers label, then a model learns.

    The last one's targets and partitions have the plain names, as later steps read them.
    """

    number: int
    total: int

    @property
    def targets(self) -> str:
        """The step of the targets that are made."""
        return TARGETS_STEP if self.number == self.total else self._early(TARGETS_FOLDER)

    @property
    def partitions(self) -> str:
        """The step of the training partitions that are made of them."""
        return PARTITIONS_STEP if self.number == self.total else self._early(PARTITIONS_FOLDER)

    def siblings(self, ensemble: int) -> tuple[str, ...]:
        """Name the student's bidirectional siblings: a later round's teachers, one at least."""
        assert self.number > 1, "the first round's teachers learn from labelled data alone"
        return teachers(max(1, ensemble), f"{TEACHER}_round_{self.number}")

    def _early(self, folder: str) -> str:
        return f"{folder}/round_{self.number}"


ONLY_ROUND = TargetsRound(1, 1)


def targets_rounds(total: int) -> list[TargetsRound]:
    """Return so many rounds of targets, in order."""
    return [TargetsRound(number, total) for number in range(1, total + 1)]


def labelling_models(
    trained_on: Collection[str], ensemble: int, targets_round: TargetsRound = ONLY_ROUND
) -> tuple[str, ...]:
    """Return the models whose mean posteriors label the targets: the ensemble of the round.

    They are sequence-trained before, as the paper's teacher (003 VII-C4), where the sections
    `trained_on` name it. A teacher of the user's own is no model: an ensemble of 0 has none.
    """
    is_first = targets_round.number == 1
    names = teachers(ensemble) if is_first else targets_round.siblings(ensemble)
    return tuple(map(sequence_trained, names)) if TEACHER in trained_on else names


def evaluated_models(
    trained_on: Collection[str], ensemble: int = 1, num_target_rounds: int = 1
) -> tuple[str, ...]:
    """Return the models that are scored: each teacher of an ensemble or a later round, too, alone.

    Sequence training trains those of the sections `trained_on` on.
    """
    later = targets_rounds(num_target_rounds)[1:]
    siblings = (name for each in later for name in each.siblings(ensemble))
    names = (BASELINE, *teachers(ensemble), *siblings, STUDENT)
    smbr = (sequence_trained(name) for name in names if section_of(name) in trained_on)
    return (*names, *smbr)


def task_name(number: int) -> str:
    """Name the task that reads the object, or group of objects, with this number."""
    return f"{number:06d}"


EXTENDS, LABELLED_FROM = "--extends", "--labelled-from"
"""The options that name the base of a run: the run from which it takes over all, or a part."""

INCREMENT_RECORD = f"{STEP_RECORDS_FOLDER}/increment/bases.json"
"""The record of a run that has a base: it names all runs before it."""

INCREMENT_METADATA = f"{STEP_RECORDS_FOLDER}/increment/metadata.json"
"""The record of an increment with the metadata objects that its first attempt found new."""

BASE_INPUT = "base/"
"""Before the name of a step, the input of an increment's step that is the base's manifest."""


STORE_CHECK_FOLDER = f"{STEP_RECORDS_FOLDER}/store_check"
"""Below it are the objects by which jobs find out whether the store behaves as they need it."""


def job_record(job: str) -> str:
    """Return the key of a job's record: its seconds, requests and recipe, and its manifests."""
    return f"{STEP_RECORDS_FOLDER}/{job}.json"


def start_record(job: str) -> str:
    """Return the key of what a job stores as it begins, and removes when it has ended."""
    return f"{STEP_RECORDS_FOLDER}/started/{job}.json"


def metrics_file(job: str) -> str:
    """Return the key of a job's metrics, in the text format of Prometheus."""
    return f"{STEP_RECORDS_FOLDER}/{job}.prom"


def folder_of(step: str) -> str:
    """Return the first folder of a step's name: the kind of step that it is."""
    return step.partition("/")[0]


SELECTED_PREFIX = "selected-"
"""The names of the tasks that select begin so, those of the step's other tasks do not."""


PHONES_PREFIX = "phones-"
"""So do those of the tasks of an alignment that align phones, for the tree to grow."""


def bucket_of(uri: str) -> str:
    """Return the speaker bucket that a metadata object's URI names, or the one of all objects."""
    match = re.search(r".*/speaker_bucket=([^/]+)/", uri)
    return f"bucket-{match[1] if match else 'all'}"
