"""Export features and targets to Kaldi archives or lhotse Shar.

megahour export_shards --recipe demo --run runs/demo --subset unlabelled --format shar --out shar
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from infra.log_lines import progress_bar
from infra.settings import ConfigurationError
from jobs.cli.command_line import Answer, Query, main
from jobs.cli.job import Job
from pipeline.filterbank import NUM_BINS
from pipeline.records import Tally
from pipeline.runs.manifest import Output, read_manifest, read_output
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    ALL_SUBSETS,
    LABELLED,
    PARTITIONS_STEP,
    UNLABELLED,
    features_step,
)
from pipeline.shards import FeatureRow, PartitionRow, read_features, read_partition
from pipeline.shards.exported import KaldiFolder, write_shar

TARGETS = {LABELLED: ALIGNMENT_STEP, UNLABELLED: PARTITIONS_STEP}
"""The step that joins a subset's features with targets; other subsets have features alone."""

Rows = Sequence[FeatureRow | PartitionRow]


def export_shards(job: Job) -> Answer:
    """Write one shard after the other, of which one is in memory."""
    arguments = job.arguments
    folder = _new_folder(Path(arguments.out))
    step = TARGETS.get(arguments.subset, "")
    if not (step and job.has(step)):
        step = features_step(arguments.subset)
    outputs = read_manifest(job.store, job.run_uri, step).outputs
    kaldi = KaldiFolder(folder) if arguments.format == "kaldi" else None
    read: Callable[[bytes], Rows] = read_features if step.startswith("features") else read_partition
    shown = progress_bar(outputs, description=f"export {step}", unit="shard")
    for number, output in enumerate(shown):
        rows = read(read_output(job.store, job.run_uri, output))
        if kaldi is not None:
            kaldi.write_shard(number, rows)
        else:
            write_shar(folder, number, rows)
    if kaldi is not None:
        kaldi.finish()
    return _answer(step, folder, arguments.format, outputs)


def _answer(step: str, folder: Path, form: str, outputs: Sequence[Output]) -> Answer:
    total = sum((output.tally for output in outputs), Tally())
    document: dict[str, Any] = {
        "step": "export_shards",
        "source": step,
        "folder": str(folder),
        "format": form,
        "shards": len(outputs),
        "utterances": total.utterances,
        "hours": round(total.hours, 4),
    }
    text = (
        f"{folder}: {step} in {len(outputs)} {form} shards, {total.utterances:,} utterances, "
        f"{total.hours:.2f} h"
    )
    return Answer(True, text, document)


def _new_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_used = any(folder.iterdir())
    except OSError as error:
        raise ConfigurationError(f"--out {folder}: {error.strerror}: name a new folder") from error
    if is_used:
        raise ConfigurationError(f"--out {folder}: has files already: name a new folder")
    return folder


QUERY = Query(
    name="export_shards",
    description=f"Export a subset's features, {NUM_BINS} log-mel energies at 100 Hz after the "
    "causal mean, and its targets where they are joined: senones of the labelled frames (Kaldi's "
    "ali), the k best of the unlabelled low-rate frames (Kaldi's post; Shar's senones, logits and "
    "log_z). The folder is a Kaldi data directory, or is read by lhotse's CutSet.from_shar.",
    exit_codes="0 written, 1 failed, 2 bad usage or recipe.",
    answer=export_shards,
)

if __name__ == "__main__":
    parser = QUERY.parser()
    add = parser.add_argument
    add("--out", required=True, metavar="FOLDER", help="new folder on this machine")
    add("--format", required=True, choices=("kaldi", "shar"), help="Kaldi ark and scp, or Shar")
    add("--subset", default=UNLABELLED, choices=ALL_SUBSETS, help=f"default {UNLABELLED}")
    main(QUERY, parser.parse_args())
