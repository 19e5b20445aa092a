"""Ingest a Kaldi data directory, or manifests of audio elsewhere.

megahour ingest --recipe recorded --run runs/mine --kaldi-dir /data/mine --placements 2
megahour ingest --recipe recorded --run s3://mine/run --manifest s3://mine/manifest.jsonl
"""

import argparse
import io
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from infra.settings import ConfigurationError
from jobs.cli.arguments import (
    HELDOUT_PLACEMENTS,
    PLACEMENT_SEED,
    TRAINING_PLACEMENTS,
    add_dev_share_argument,
    add_placement_arguments,
    add_source_arguments,
    require_source_options,
)
from jobs.cli.catalogue import INGEST
from jobs.cli.command_line import Step, StepResults, main
from jobs.cli.job import Job
from jobs.cli.spark_steps import distribute_on_spark
from jobs.ingestion.corpus import Placing, Simulate, ingest
from jobs.ingestion.kaldi_directory import UNDETERMINED_LOCALE, KaldiUtterance
from jobs.ingestion.sources import (
    announce_lexicon,
    ingestion_of,
    put_lexicon,
    require_same_speakers,
    require_usable_manifests,
)
from jobs.synthesis.corpus import draw_acoustics, draw_development_acoustics
from pipeline.audio.conversion import NO_CONVERSION, AudioConversion
from pipeline.audio.placements import (
    PLACEMENTS,
    PLACEMENTS_BY_NAME,
    Acoustics,
    record_file,
)
from pipeline.records import CLEAN, Quarantined, Tally
from pipeline.runs.engine import Loss, LossLimit, StepRun, StepSpec, run_step
from pipeline.runs.manifest import Manifest, Output, sha256
from pipeline.runs.names import (
    DEV,
    DEV_SHARE_SETTING,
    HELDOUT,
    INGEST_STEP,
    LEXICON_FILE,
    PLACEMENTS_SETTING,
)
from pipeline.sampling import sampling_priority
from pipeline.steps.ingestion.ingest_manifests import ManifestIngestion, ingest_manifests
from pipeline.steps.ingestion.placed_audio import (
    PlacementChoice,
    PlacementRules,
    SimulatedPlacements,
)

SIMULATORS = ("espeakng-loader", "numpy", "pyroomacoustics", "scipy", "soundfile")
"""The distributions that decide the bytes of simulated placements."""


def run(job: Job) -> StepResults:
    """Write metadata, lexicon and the like, and copy a directory's audio, unless it was done."""
    require_source_options(job.arguments)
    directory = job.arguments.kaldi_dir
    if directory and not Path(directory).is_dir():
        raise ValueError(f"--kaldi-dir {directory} is not a directory: correct the path")
    results = _ingest_manifests(job) if job.arguments.manifest else _ingest_directory(job)
    put_lexicon(job)
    return results


def _ingest_manifests(job: Job) -> StepResults:
    channel = job.recipe.features.conversion.channel
    ingestion = ingestion_of(job.arguments, job.store, channel)
    if job.increment:
        require_same_speakers(job.store, job.increment.bases, ingestion)
    ingestion = replace(ingestion, adds=job.increment is not None)
    if (placing := placing_of(job.arguments)) is not None:
        ingestion = in_placements(ingestion, placing, job.recipe.features.conversion)
    require_usable_manifests(job)
    announce_lexicon(job)
    place = job.store, job.run_uri, job.corpus_uri
    with distribute_on_spark(job) as distribute:
        return [ingest_manifests(*place, ingestion, job.recipe.loss_budget, distribute)]


def _ingest_directory(job: Job) -> StepResults:
    announce_lexicon(job)
    directory = Path(job.arguments.kaldi_dir)
    digests = {
        path.name: sha256(path.read_bytes())
        for path in sorted(directory.iterdir())
        if path.is_file() and path.suffix != ".ctm" and path.name != LEXICON_FILE
    }
    placing = placing_of(job.arguments)
    share, locale = job.arguments.dev_share, job.arguments.locale or UNDETERMINED_LOCALE
    config = config_of(placing) | ({DEV_SHARE_SETTING: share} if share else {})
    # Without one a manifest is as it was before there was one.
    config |= {"locale": locale} if locale != UNDETERMINED_LOCALE else {}
    engines = () if placing is None else SIMULATORS
    spec = StepSpec(job.store, job.run_uri, INGEST_STEP, config, digests=digests, engines=engines)
    return [run_step(spec, lambda step: _write_corpus(job, step, directory, placing))]


def placing_of(arguments: argparse.Namespace) -> Placing | None:
    """Read the placements; ConfigurationError for unknown ones, None where there are none."""
    training, heldout = arguments.placements, arguments.heldout_placements
    seed: int | None = arguments.placement_seed
    if training is None:
        for option, value in ((HELDOUT_PLACEMENTS, heldout), (PLACEMENT_SEED, seed)):
            if value is not None:
                raise ConfigurationError(f"{option} without {TRAINING_PLACEMENTS}: give both")
        return None
    of_training = _choice(TRAINING_PLACEMENTS, training)
    of_heldout = of_training if heldout is None else _choice(HELDOUT_PLACEMENTS, heldout)
    seed = seed or 0
    with _refusing(PLACEMENT_SEED):
        return Placing(of_training, of_heldout, seed, simulator(seed))


def _choice(option: str, text: str) -> PlacementChoice:
    with _refusing(option):
        return PlacementChoice.parse(text, [placement.name for placement in PLACEMENTS])


@contextmanager
def _refusing(option: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigurationError(f"{option}: {error}") from error


def simulator(seed: int) -> Simulate:
    """Return the function that simulates placements; it draws rooms and noises when first used.

    Those of development and of held-out speakers are in no other subset.
    """
    drawn = cache(lambda: draw_acoustics(seed))
    of_development = cache(lambda: draw_development_acoustics(seed))
    lock = Lock()

    def acoustics_of(subset: str) -> Acoustics:
        with lock:  # of all threads one draws
            if subset == DEV:
                return of_development()
            training, heldout = drawn()
            return heldout if subset == HELDOUT else training

    def simulate(utterance: KaldiUtterance, data: bytes) -> bytes:
        acoustics = acoustics_of(utterance.subset)
        # The id names the placement too, so each version has a room and a noise of its own.
        generator = np.random.default_rng(sampling_priority(seed, utterance.utterance_id))
        placement = PLACEMENTS_BY_NAME[utterance.placement or ""]
        return record_file(data, placement, acoustics, generator)

    return simulate


def in_placements(
    ingestion: ManifestIngestion, placing: Placing, conversion: AudioConversion
) -> ManifestIngestion:
    """Return what ingests manifests' utterances in placements, as a directory's would be.

    Audio is converted as extraction would do it.
    """
    choices = placing.choices
    subsets = [
        subset
        for manifest in ingestion.manifests
        for subset in ingestion.rules.subsets_of(manifest.subset)
        if set(choices.choice(subset).placements) != {CLEAN}
    ]
    rules = PlacementRules(choices, conversion)
    draw = partial(stored_acoustics, placing.seed, subsets)
    converted = {} if conversion == NO_CONVERSION else {"conversion": asdict(conversion)}
    return replace(
        ingestion,
        settings={**ingestion.settings, **config_of(placing), **converted},
        simulated=SimulatedPlacements(rules, draw, SIMULATORS),
    )


def stored_acoustics(seed: int, subsets: Collection[str]) -> dict[str, bytes]:
    """Draw the rooms and noises of subsets, as the bytes that tasks read."""
    if not subsets:
        return {}
    require_simulators()
    of_development = _encoded(draw_development_acoustics(seed)) if DEV in subsets else b""
    others = {DEV} != set(subsets)
    training, heldout = map(_encoded, draw_acoustics(seed)) if others else (b"", b"")
    by_subset = {DEV: of_development, HELDOUT: heldout}
    return {subset: by_subset.get(subset, training) for subset in subsets}


def _encoded(acoustics: Acoustics) -> bytes:
    file = io.BytesIO()
    acoustics.save(file)
    return file.getvalue()


def config_of(placing: Placing | None) -> dict[str, Any]:
    """Return the settings that decide the corpus beside its data directory."""
    if placing is None:
        return {}
    choices = {"training": asdict(placing.training), "heldout": asdict(placing.heldout)}
    return {PLACEMENTS_SETTING: {**choices, "seed": placing.seed}}


def require_simulators() -> None:
    """Raise ConfigurationError, with what to install, if a simulator is absent."""
    try:
        for name in SIMULATORS:
            version(name)
    except PackageNotFoundError as error:
        remedy = "simulated placements need it: pip install megahour[demo]"
        raise ConfigurationError(f"{TRAINING_PLACEMENTS}: {error.name}: {remedy}") from error


def _write_corpus(job: Job, step: StepRun, directory: Path, placing: Placing | None) -> Manifest:
    if placing is not None:
        require_simulators()
    ledgers: list[Output] = []

    def judge(rows: Sequence[Quarantined], tally_in: Tally) -> None:
        if ledger := step.context.put_ledger(INGEST_STEP, rows):
            ledgers.append(ledger)
            limit = LossLimit(job.recipe.loss_budget, tally_in.utterances)
            limit.check(len(rows), Loss(INGEST_STEP, Counter(ledger.reasons), ledger.key))

    share, locale = job.arguments.dev_share, job.arguments.locale or UNDETERMINED_LOCALE
    corpus = ingest(directory, job.store, job.corpus_uri, judge, placing, share, locale)
    tally, quarantined = (
        sum((output.tally for output in outputs), Tally()) for outputs in (corpus.outputs, ledgers)
    )
    return step.manifest(
        outputs=corpus.outputs,
        tally_in=tally + quarantined,
        tally_out=tally,
        ledgers=tuple(ledgers),
        quarantined=quarantined,
        statistics={
            "utterances": corpus.utterances,
            "hours": corpus.hours,
            "unreadable": corpus.unreadable,
            "unlisted": corpus.unlisted,
        },
    )


STEP = Step(
    name=INGEST,
    description="Copy a Kaldi data directory into the store as a corpus of audio objects and "
    "metadata. Required are wav.scp, text, utt2spk, lexicon.txt, labelled.speakers, "
    "unlabelled.speakers and heldout.speakers; optional are dev.speakers, utt2placement, utt2time, "
    "utt2dur, spk2locale, utt2lang, language_model.txt and language_model.arpa, also with .gz. "
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
