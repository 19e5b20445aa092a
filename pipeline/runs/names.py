"""The names of a run's steps, which are their folders below the run, and of files in them."""

LABELLED, UNLABELLED, HELDOUT = "labelled", "unlabelled", "heldout"
SUBSETS = (LABELLED, UNLABELLED, HELDOUT)
"""The parts of a corpus: transcribed, untranscribed, and transcribed for evaluation alone."""

ALIGNER, BASELINE, TEACHER, STUDENT = "aligner", "baseline", "teacher", "student"
EVALUATED_MODELS = (BASELINE, TEACHER, STUDENT)

# Folders of the steps that are made for several subsets or models.
SELECTION_FOLDER = "selection"
FEATURES_FOLDER = "features"
TARGETS_FOLDER = "targets"
PARTITIONS_FOLDER = "partitions"
ALIGNMENTS_FOLDER = "alignments"
MODELS_FOLDER = "models"

INGEST_STEP = "ingest"
BOOTSTRAP_STEP = f"{ALIGNMENTS_FOLDER}/bootstrap"
ALIGNMENT_STEP = f"{ALIGNMENTS_FOLDER}/{LABELLED}"
TARGETS_STEP = f"{TARGETS_FOLDER}/{UNLABELLED}"
PARTITIONS_STEP = f"{PARTITIONS_FOLDER}/{UNLABELLED}"
CERTIFICATE_STEP = "certificate"
EVALUATION_STEP = "evaluation"
REPORT_STEP = "report"

# Within a step's folder.
MANIFEST_FILE = "manifest.json"
COMMITS_FOLDER = "commits"
SCRATCH_FOLDER = "scratch"
CHECKPOINTS_FOLDER = "checkpoints"
LEDGER_SUFFIX = ".ledger.jsonl"

# Within a run, beside the steps; and within a corpus.
STEP_RECORDS_FOLDER = "steps"
PLAN_FOLDER = "plan"
CORPUS_FOLDER = "corpus"
METADATA_FOLDER = "metadata"


def selection_step(subset: str) -> str:
    """Name the step that selects the utterances of `subset`."""
    return f"{SELECTION_FOLDER}/{subset}"


def features_step(subset: str) -> str:
    """Name the step that extracts the features of `subset`."""
    return f"{FEATURES_FOLDER}/{subset}"


def model_step(name: str) -> str:
    """Name the step that trains the model `name`."""
    return f"{MODELS_FOLDER}/{name}"


def task_name(number: int) -> str:
    """Name the task that reads the object, or group of objects, with this number."""
    return f"{number:06d}"


def folder_of(step: str) -> str:
    """Return the first folder of a step's name: the kind of step that it is."""
    return step.partition("/")[0]
