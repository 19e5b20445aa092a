"""Measure the throughputs of this machine's core and device as a calibration.

The core runs the steps of the data pipeline on a little synthetic speech; the device runs the
recipe's models, forward and through a training step.
"""

import io
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial

import numpy as np
import soundfile
import torch
from jaxtyping import Float32

from infra.store.object_store import ObjectStore, join_uri
from jobs.planning.calibration import (
    HERE,
    Calibration,
    CoreRates,
    DeviceRates,
    ModelRate,
    read_published,
)
from pipeline.filterbank import FRAME_SHIFT_MS, NUM_INPUTS, SAMPLE_RATE_HZ, STACK
from pipeline.kbest import select_kbest
from pipeline.records import Utterance
from pipeline.runs.commit import step_context
from pipeline.runs.engine import serially, write_manifest
from pipeline.runs.manifest import Manifest
from pipeline.runs.names import SELECTION_FOLDER, TEACHER, UNLABELLED, model_step
from pipeline.settings import SelectionConfig
from pipeline.steps.features import extract_features
from pipeline.steps.repartition import repartition
from pipeline.steps.selection.select import metadata_uri, select_utterances
from pipeline.steps.targets import Teacher, generate_targets
from training.cost_model.measured_rates import measure_messages
from training.cost_model.step_time import RankRates, ScalingCalibration
from training.data.minibatch import Minibatch
from training.data.row_order import chunked_shape
from training.data.targets import HardTargets
from training.fit.steps import gradients_of
from training.models.parameter_count import num_parameters
from training.models.precision import fastest_precision, set_float32_products
from training.models.store import make_model
from training.settings.model_training import TrainingSettings
from training.settings.models import ModelConfig
from training.settings.recipe import Recipe
from training.trainers.trainer import make_optimizer

NUM_CLIPS = 16
MAX_UTTERANCES = 256
MAX_CLIP_SECONDS = 60
AUDIO_SECONDS = 900
FILE_HOURS = 0.125
NUM_RECORDS = 5_000
"""Metadata records for selection, which reads no audio."""

NUM_ROUNDS = 2
"""Rounds of which the fastest counts, as on a free core; the first one warms up, too."""

KBEST_FRAMES = 512
MAX_FRAMES = 512
"""Frames a minibatch on a core: the paper's models need seconds for them; more gain nothing."""


def calibrate(recipe: Recipe, utterance_seconds: float) -> Calibration:
    """Measure this machine's core and device; take the rest from published figures."""
    published = read_published()
    core = measure_core(recipe, utterance_seconds)
    device = measure_device(recipe, utterance_seconds)
    system = f"{platform.machine()} {platform.system()}, Python {platform.python_version()}"
    return Calibration(
        machine=f"{system}, {datetime.now(UTC).date().isoformat()}",
        core=core,
        store=published.store,
        devices={**published.devices, HERE: device},
        search=published.search,
        pool=published.pool,
    )


def measure_core(recipe: Recipe, utterance_seconds: float) -> CoreRates:
    """Measure one core on this recipe and this length of utterances, on local disk."""
    rounds = []
    for _ in range(NUM_ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(run_miniature(folder, recipe, utterance_seconds))
    rate = {name: max(each[name] for each in rounds) for name in rounds[0]}
    shape = KBEST_FRAMES, recipe.senones.max_senones
    logits = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    columns = min(recipe.targets.k, shape[1]), recipe.targets.tail_samples
    # The miniature run has 255 senones, so k-best selection is measured apart.
    kbest = min(seconds(lambda: select_kbest(logits, *columns)) for _ in range(NUM_ROUNDS))
    return CoreRates(**rate, kbest_logits_per_s=logits.size / kbest)


def run_miniature(folder: str, recipe: Recipe, utterance_seconds: float) -> dict[str, float]:
    """Run the steps below `folder`, with a teacher that costs no time; return rates of a core."""
    store, run_uri = ObjectStore((folder,)), join_uri(folder, "run")
    records = write_corpus(store, folder, utterance_seconds)
    audio_s = sum(each.duration_s for each in records)
    select(store, run_uri, folder, records)
    unread = [record(number, "audio/none.flac", 3.6) for number in range(NUM_RECORDS)]
    elsewhere = join_uri(folder, SELECTION_FOLDER)
    teacher_manifest = Manifest(model_step(TEACHER), {}, {}, ())
    write_manifest(step_context(store, run_uri, model_step(TEACHER), {}, {}), teacher_manifest)
    # The teacher's time is a device's, measured apart, so here it costs nothing.
    teacher = free_teacher(recipe.targets.k, recipe.targets.tail_samples)
    # A recipe's offsets are planned as a multiple of the work at one.
    targets = replace(recipe.targets, offsets="one")
    extract = partial(extract_features, store, run_uri, UNLABELLED, folder, recipe.features)
    return {
        "metadata_records_per_s": NUM_RECORDS / select(store, elsewhere, elsewhere, unread),
        "extraction_x_real_time": audio_s / seconds(lambda: extract(0.0, serially)),
        "targets_x_real_time": audio_s
        / seconds(lambda: generate_targets(store, run_uri, targets, teacher, serially)),
        "repartition_x_real_time": audio_s
        / seconds(lambda: repartition(store, run_uri, recipe.partitions, serially)),
    }


def seconds(function: Callable[[], object]) -> float:
    """Return the processor seconds of one call, in all threads."""
    # Elapsed time would count whatever else the machine does.
    before = time.process_time()
    function()
    return time.process_time() - before


def write_corpus(store: ObjectStore, corpus_uri: str, utterance_seconds: float) -> list[Utterance]:
    """Write a few clips, and as many records naming them as make AUDIO_SECONDS together."""
    clip_seconds = min(utterance_seconds, MAX_CLIP_SECONDS)
    clips = [speech_like(number, clip_seconds) for number in range(NUM_CLIPS)]
    uris = [f"audio/{number}.flac" for number in range(NUM_CLIPS)]
    for uri, clip in zip(uris, clips, strict=True):
        store.put(join_uri(corpus_uri, uri), flac(clip))
    number = min(max(round(AUDIO_SECONDS / clip_seconds), NUM_CLIPS), MAX_UTTERANCES)
    duration_s = len(clips[0]) / SAMPLE_RATE_HZ
    return [record(each, uris[each % NUM_CLIPS], duration_s) for each in range(number)]


def select(
    store: ObjectStore, run_uri: str, corpus_uri: str, records: Sequence[Utterance]
) -> float:
    """Write the metadata of all `records`, then time their selection in processor seconds."""
    metadata = metadata_uri(corpus_uri, UNLABELLED)
    lines = "".join(each.to_json() + "\n" for each in records).encode()
    store.put(join_uri(metadata, "speaker_bucket=00", "records.jsonl"), lines)
    config = SelectionConfig(hours=0.0, file_hours=FILE_HOURS, seed=1)
    return seconds(
        lambda: select_utterances(store, run_uri, UNLABELLED, metadata, config, 0.0, serially)
    )


def record(number: int, audio_uri: str, duration_s: float) -> Utterance:
    """Make a metadata record; sixteen share a speaker."""
    return Utterance(
        utterance_id=f"utterance-{number:09d}",
        speaker_id=f"speaker-{number // 16:06d}",
        duration_s=duration_s,
        created_at=f"2026-01-01T00:{number % 16:02d}:00+00:00",
        locale="en-US",
        audio_uri=audio_uri,
    )


def free_teacher(k: int, tail_samples: int = 0) -> Teacher:
    """Return a teacher that repeats the k best of one frame, which takes no time."""
    best = select_kbest(np.linspace(5, 0, 255, dtype=np.float32)[np.newaxis], k, tail_samples)
    return lambda inputs: (best.rows(np.zeros(len(each.frames), np.int64)) for each in inputs)


def speech_like(number: int, duration_s: float) -> Float32[np.ndarray, " samples"]:
    """Synthesize harmonics and noise that compress, and cost, about as speech does."""
    generator = np.random.default_rng(number)
    times_s = np.arange(round(max(duration_s, 0.1) * SAMPLE_RATE_HZ)) / SAMPLE_RATE_HZ
    pitch_hz = generator.uniform(90, 220)
    harmonics = (np.sin(2 * np.pi * pitch_hz * order * times_s) / order for order in range(1, 20))
    syllables = 0.5 + 0.5 * np.sin(2 * np.pi * 4 * times_s + number)
    noise = 0.02 * generator.normal(size=len(times_s))
    return (0.08 * syllables * sum(harmonics) + noise * syllables + noise / 10).astype(np.float32)


def flac(samples: Float32[np.ndarray, " samples"]) -> bytes:
    """Encode `samples` as a 16-bit FLAC file."""
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, SAMPLE_RATE_HZ, format="FLAC", subtype="PCM_16")
    return buffer.getvalue()


@contextmanager
def _one_thread() -> Iterator[torch.device]:
    """Use this machine's GPU, or one thread of its CPU, as ranks and servers do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield torch.device("cuda" if torch.cuda.is_available() else "cpu")
    finally:
        torch.set_num_threads(threads)


def measure_device(recipe: Recipe, utterance_seconds: float) -> DeviceRates:
    """Time the recipe's models on this machine's GPU, or on one thread of its CPU."""
    models, senones = recipe.models, recipe.senones.max_senones
    length = max(round(utterance_seconds * 1000 / (STACK * FRAME_SHIFT_MS)), 1)
    with _one_thread() as device:
        limit = _max_frames(device)
        request = min(recipe.targets.request_frames, limit)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "one core"
        return DeviceRates(
            source=f"measured on {name}: training on {min(recipe.student.minibatch_frames, limit)} "
            f"frames in chunks, forward on {request}",
            student_training=training_rate(models.student, recipe.student, senones, device),
            teacher_training=training_rate(models.teacher, recipe.teacher, senones, device),
            teacher_forward=forward_rate(models.teacher, senones, request, length, device),
        )


def measure_rank(
    calibration: ScalingCalibration, recipe: Recipe, density: float
) -> ScalingCalibration:
    """Measure this machine's GPU, or one thread of its CPU, as the rank of `calibration`."""
    senones = recipe.senones.max_senones
    with _one_thread() as device:
        student = training_rate(recipe.models.student, recipe.student, senones, device)
        messages = measure_messages(density, device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    today = datetime.now(UTC).date().isoformat()
    source = f"rank measured on {name}, {today}; else: {calibration.source}"
    rank = RankRates(**asdict(student), **asdict(messages))
    return replace(calibration, source=source, rank=rank)


def _max_frames(device: torch.device) -> int:
    return MAX_FRAMES if device.type == "cpu" else 1 << 20


def training_rate(
    config: ModelConfig, training: TrainingSettings, num_senones: int, device: torch.device
) -> ModelRate:
    """Time low-rate frames through training steps on minibatches of chunks, as a job takes them.

    On a GPU the gradients are a graph, in the recipe's precision.
    """
    model = make_model(config, num_senones).to(device).train()
    optimizer = make_optimizer(training.optimizer, model.parameters())
    frames = min(training.minibatch_frames, _max_frames(device))
    compute = gradients_of(model, replace(training, minibatch_frames=frames))
    batch, length = chunked_shape(frames)
    features = torch.randn(batch, length, NUM_INPUTS, device=device)
    labels = torch.randint(num_senones, (batch, length), device=device)
    minibatch = Minibatch(features, torch.full((batch,), length), HardTargets(labels))

    def step() -> None:
        optimizer.zero_grad()
        compute(minibatch)
        optimizer.step()

    set_float32_products(training.precision)
    try:
        return _rate(step, batch * length, config, num_senones, device)
    finally:
        set_float32_products("float32")


def forward_rate(
    config: ModelConfig, num_senones: int, request_frames: int, length: int, device: torch.device
) -> ModelRate:
    """Time the forward pass of a request of whole utterances, in a teacher's precision."""
    model = make_model(config, num_senones).to(device).eval()
    count = max(request_frames // length, 1)
    utterances = [torch.randn(length, NUM_INPUTS, device=device) for _ in range(count)]
    precision = fastest_precision(device)

    def request() -> object:
        return model.utterance_logits(utterances, precision)

    set_float32_products("tf32" if precision == "bfloat16" else "float32")
    try:
        return _rate(request, count * length, config, num_senones, device)
    finally:
        set_float32_products("float32")


def _rate(
    function: Callable[[], object],
    num_frames: int,
    config: ModelConfig,
    num_senones: int,
    device: torch.device,
) -> ModelRate:
    function()
    # Other work on the machine only adds time, so the fastest round is the device's.
    best, spent = float("inf"), 0.0
    while spent < 0.25:
        started = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started
        best, spent = min(best, seconds), spent + seconds
    return ModelRate(num_frames / best, num_parameters(config, num_senones))
