"""Ingest a Kaldi data directory, or manifests of audio elsewhere.

megahour ingest --recipe recorded --run runs/mine --kaldi-dir /data/mine --placements 2
megahour ingest --recipe recorded --run s3://mine/run --manifest s3://mine/manifest.jsonl
"""

import argparse
from collections.abc import Collection
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from infra.extras import how_to_install
from infra.log_lines import log
from infra.settings import ConfigurationError
from jobs.cli.arguments import (
    HELDOUT_PLACEMENTS,
    PLACEMENT_SEED,
    TRAINING_PLACEMENTS,
    UNLABELLED_SPEAKERS,
    add_dev_share_argument,
    add_placement_arguments,
    add_source_arguments,
    require_source_options,
)
from jobs.cli.command_line import Step, StepResults, main
from jobs.cli.job import Job
from jobs.cli.spark_steps import distribute_on_spark
from jobs.ingest_sources import (
    announce_lexicon,
    ingestion_of,
    require_same_speakers,
    require_usable_manifests,
    transcripts_of,
)
from jobs.lexicon_sources import put_lexicon
from jobs.run_table import INGEST
from pipeline.audio.placements import PLACEMENTS, Acoustics
from pipeline.steps.ingestion.ingest_manifests import ingest_manifests
from pipeline.steps.ingestion.kaldi_directory import (
    UNDETERMINED_LOCALE,
    DirectoryIngestion,
    ingest_directory,
)
from pipeline.steps.ingestion.placed_audio import PlacementChoice, Simulation, SubsetChoices
from pipeline.steps.ingestion.transcripts import HYPOTHESES

SIMULATORS = ("espeakng-loader", "numpy", "pyroomacoustics", "scipy", "soundfile")
"""The distributions that decide the bytes of simulated placements."""


def run(job: Job) -> StepResults:
    """Write metadata, lexicon and the like, and copy a directory's audio, unless it was done."""
    require_source_options(job.arguments)
    results = _ingest_manifests(job) if job.arguments.manifest else _ingest_directory(job)
    put_lexicon(job)
    for manifest in (each.manifest for each in results):
        for recognizer, count in manifest.statistics.get(HYPOTHESES, {}).items():
            heard = f"{recognizer} heard {count} of {manifest.tally_out.utterances} utterances"
            log(heard, INGEST)
    return results


def _ingest_manifests(job: Job) -> StepResults:
    ingestion = ingestion_of(job, simulation_of(job.arguments))
    if job.bases.runs:
        require_same_speakers(job.store, job.bases.runs, ingestion)
    require_usable_manifests(job)
    announce_lexicon(job)
    with distribute_on_spark(job) as distribute:
        return [ingest_manifests(*job.place, ingestion, job.recipe.loss_budget, distribute)]


def _ingest_directory(job: Job) -> StepResults:
    path = Path(job.arguments.kaldi_dir)
    announce_lexicon(job)
    speakers, normalization = path / UNLABELLED_SPEAKERS, job.recipe.models.normalization
    if not speakers.exists() and normalization != "labelled":
        remedy = "add it, or set models.normalization = 'labelled' for labelled speech alone"
        raise ValueError(f"{speakers}: missing, and models.normalization = 'all': {remedy}")
    ingestion = DirectoryIngestion(
        path,
        dev_share=job.arguments.dev_share,
        locale=job.arguments.locale or UNDETERMINED_LOCALE,
        simulation=simulation_of(job.arguments),
        transcripts=transcripts_of(job),
    )
    return [ingest_directory(*job.place, ingestion, job.recipe.loss_budget)]


def simulation_of(arguments: argparse.Namespace) -> Simulation | None:
    """Read the placements; ConfigurationError for unknown ones, None where there are none."""
    training, heldout = arguments.placements, arguments.heldout_placements
    seed: int | None = arguments.placement_seed
    if training is None:
        for option, value in ((HELDOUT_PLACEMENTS, heldout), (PLACEMENT_SEED, seed)):
            if value is not None:
                raise ConfigurationError(f"{option} without {TRAINING_PLACEMENTS}: give both")
        return None
    known, option = [placement.name for placement in PLACEMENTS], TRAINING_PLACEMENTS
    try:
        of_training = of_heldout = PlacementChoice.parse(training, known)
        if heldout is not None:
            option = HELDOUT_PLACEMENTS
            of_heldout = PlacementChoice.parse(heldout, known)
        option = PLACEMENT_SEED
        choices = SubsetChoices(of_training, of_heldout, seed or 0)
    except ValueError as error:
        raise ConfigurationError(f"{option}: {error}") from error
    return Simulation(choices, partial(draw, choices.seed), SIMULATORS)


def draw(seed: int, subsets: Collection[str]) -> dict[str, Acoustics]:
    """Draw the rooms and noises of subsets, in their order; ConfigurationError if one cannot."""
    if not subsets:
        return {}
    try:
        for name in SIMULATORS:
            version(name)
    except PackageNotFoundError as error:
        remedy = f"simulated placements need it: {how_to_install(['demo'])}"
        raise ConfigurationError(f"{TRAINING_PLACEMENTS}: {error.name}: {remedy}") from error
    from jobs.synthesis.corpus import draw_acoustics  # noqa: PLC0415 - imports scipy.signal

    return draw_acoustics(seed, subsets)


STEP = Step(
    name=INGEST,
    description="Copy a Kaldi data directory into the store as a corpus of audio objects and "
    "metadata. Required are wav.scp, text, utt2spk, lexicon.txt, labelled.speakers and "
    "heldout.speakers; optional are dev.speakers, utt2placement, utt2time, utt2dur, spk2locale, "
    "utt2lang, language_model.txt and language_model.arpa, also with .gz. Without "
    "unlabelled.speakers baseline and teacher alone are trained and scored. "
    "Utterances without a usable record or file become ledger rows. With --placements each "
    "utterance is stored once for each of its placements in simulated rooms, with noise. With "
    "--manifest the audio stays where it is, in S3 or on local paths below corpus.audio_prefixes, "
    "and metadata alone is written, or FLACs of simulated placements too, by Spark tasks for each "
    "object or part of one.",
    run=run,
)

if __name__ == "__main__":
    parser = STEP.parser()
    add_source_arguments(parser, required=True)
    add_placement_arguments(parser)
    add_dev_share_argument(parser)
    main(STEP, parser.parse_args())
