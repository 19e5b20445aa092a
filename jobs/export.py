"""Export a model with all that recognizes speech, as one file.

megahour export --recipe demo --run runs/demo --out student.zip
"""

from pathlib import Path
from typing import Any, Literal

from infra.extras import how_to_install
from infra.settings import ConfigurationError
from jobs.cli.command_line import Answer, Query, main
from jobs.cli.job import Job
from pipeline.runs.names import BASELINE, STUDENT

SCORED_PIECE_S = 0.3
"""The score hears audio in pieces of this length, as `transcribe` does by default."""


def export(job: Job) -> Answer:
    """Write the archive; with --score, transcribe the held-out audio with what was written."""
    path, recipe, names = Path(job.arguments.out), job.recipe, job.evaluated_models
    name = job.arguments.model or (STUDENT if STUDENT in names else BASELINE)
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"{path.parent} is no folder"
        raise ConfigurationError(f"--out {path}: {what}: name a file, such as student.zip")
    if name not in names:
        raise ConfigurationError(f"--model {name}: need one of {', '.join(names)}")
    # `--help` needs no ONNX.
    from training.export.archive import read_archive, write_archive  # noqa: PLC0415
    from training.export.export_model import export_model, score_heldout  # noqa: PLC0415

    precision: Literal["int8", "float32"] = "int8" if job.arguments.int8 else "float32"
    exported = export_model(*job.place[:2], recipe, name, precision)
    num_bytes = write_archive(path, exported)
    document: dict[str, Any] = {
        "step": "export",
        "model": name,
        "precision": precision,
        "file": str(path),
        "bytes": num_bytes,
        "network_bytes": len(exported.network),
        "graph_states": len(exported.graph.fst.states),
    }
    lines = [f"{path}: {name} in {precision}, {num_bytes:,} bytes"]
    if job.arguments.score:
        found = score_heldout(*job.place, recipe.features, read_archive(path), SCORED_PIECE_S)
        errors = found.errors
        document["score"] = {
            "word_error_rate": errors.word_error_rate,
            "errors": errors.errors,
            "reference_words": errors.reference_words,
            "utterances": found.num_utterances,
            "refused": found.num_refused,
        }
        refused = f", {found.num_refused} refused as audio" if found.num_refused else ""
        lines.append(
            f"held-out WER {errors.word_error_rate:.2f} % ({errors.errors:,} errors in "
            f"{errors.reference_words:,} words of {found.num_utterances:,} utterances{refused})"
        )
    return Answer(True, "\n".join(lines), document)


QUERY = Query(
    name="export",
    description="Export a model for devices. The archive holds the network as ONNX, with its "
    "normalization, causal mean and all state as inputs and outputs, the decoding graph, words and "
    "settings of the evaluation. `megahour transcribe` recognizes speech with it as it arrives. "
    "Models that need whole utterances, such as a bidirectional teacher, are refused. Needs "
    f"{how_to_install(['deploy', 'train'])}.",
    exit_codes="0 written, 1 failed or cannot be exported, 2 bad usage or recipe.",
    answer=export,
)

if __name__ == "__main__":
    parser = QUERY.parser()
    add = parser.add_argument
    add("--out", required=True, metavar="FILE", help="the archive to write, a zip file")
    text = f"model of the run, such as student_smbr; default {STUDENT}, or without one {BASELINE}"
    add("--model", default="", metavar="NAME", help=text)
    text = "round weights to 8 bits: a third of the bytes; only onnxruntime reads it; add --score"
    add("--int8", action="store_true", help=text)
    text = "transcribe the held-out audio with the written archive, and print its word error rate"
    add("--score", action="store_true", help=text)
    main(QUERY, parser.parse_args())
