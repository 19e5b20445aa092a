"""What k columns a frame cost: against sums over senones, and measured once on a sample."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from infra.store.object_store import ObjectStore
from pipeline.filterbank import NUM_BINS
from pipeline.kbest import TeacherFailure
from pipeline.records import WITHOUT_PLACEMENT, Tally
from pipeline.runs.engine import StepResult, StepRun, StepSpec, run_step
from pipeline.runs.manifest import Manifest, read_manifest
from pipeline.runs.names import STUDENT, TEACHER, UNLABELLED, features_step, model_step
from pipeline.settings import TargetsConfig
from pipeline.shards import FeatureRow, write_features
from pipeline.steps.targets import FEATURES, FramesAt
from training.models.losses import ghost_cross_entropy, kbest_cross_entropy
from training.models.store import TrainedModel, make_model, store_model
from training.settings.decoding import OwnTeacherConfig
from training.settings.models import LstmConfig
from training.targets import kbest_costs as kbest_sample
from training.targets.kbest_costs import (
    CostedTeachers,
    kbest_costs,
    measure_kbest_costs,
    num_drawn,
    sample_utterances,
    trained_teachers,
)

SENONES = 45


def logits(seed: int, num_frames: int = 12) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    teacher = generator.normal(size=(num_frames, SENONES)) * 2
    student = teacher + generator.normal(size=(num_frames, SENONES)) * 2
    return teacher.astype(np.float32), student.astype(np.float32)


def posteriors(row: np.ndarray) -> list[float]:
    total = math.fsum(math.exp(float(each)) for each in row)
    return [math.exp(float(each)) / total for each in row]


def degrees(one: list[float], other: list[float]) -> float:
    product = math.fsum(a * b for a, b in zip(one, other, strict=True))
    lengths = [math.sqrt(math.fsum(a * a for a in each)) for each in (one, other)]
    return math.degrees(math.acos(min(max(product / lengths[0] / lengths[1], -1), 1)))


@pytest.mark.parametrize("k", [1, 5, 20, SENONES])
def test_costs_are_sums_over_the_senones(k: int) -> None:
    """Mass, agreement, calibration and the renormalized gradient's angle, in pure Python."""
    teacher, student = logits(k)
    found = kbest_costs(teacher, student, k, 0)
    for frame in range(len(teacher)):
        t, p = posteriors(teacher[frame]), posteriors(student[frame])
        best = sorted(range(SENONES), key=lambda each, t=t: -t[each])[:k]
        mass = math.fsum(t[each] for each in best)
        target = [t[each] / mass if each in best else 0 for each in range(SENONES)]
        assert found["mass"][frame] == pytest.approx(mass)
        assert found["agreement"][frame] == (p.index(max(p)) in best)
        assert found["calibration_error_renormalized"][frame] == pytest.approx(
            t[best[0]] / mass - t[best[0]], abs=1e-12
        )
        full = [a - b for a, b in zip(p, t, strict=True)]
        angle = degrees([a - b for a, b in zip(p, target, strict=True)], full)
        assert found["angle_renormalized"][frame] == pytest.approx(angle, abs=1e-4)


@pytest.mark.parametrize("k", [1, 5, 20])
def test_angles_are_those_of_the_losses_gradients(k: int) -> None:
    """Against automatic differentiation of what training computes."""
    teacher, student = logits(k)
    found = kbest_costs(teacher, student, k, 0)
    t = torch.softmax(torch.from_numpy(teacher).double(), -1)[None]
    kept = t.topk(k)
    for form, loss, targets in (
        ("renormalized", kbest_cross_entropy, kept.values / kept.values.sum(-1, keepdim=True)),
        ("ghost", ghost_cross_entropy, kept.values),
    ):
        given = torch.from_numpy(student).double()[None].requires_grad_()
        (gradient,) = torch.autograd.grad(loss(given, kept.indices, targets), given)
        full = torch.softmax(given.detach(), -1) - t
        cosines = torch.nn.functional.cosine_similarity(gradient, full, dim=-1)[0]
        expected = np.degrees(np.arccos(cosines.numpy().clip(-1, 1)))
        np.testing.assert_allclose(found[f"angle_{form}"], expected, atol=1e-4)


def test_only_the_renormalized_head_is_too_sure() -> None:
    """The other forms fit the teacher's best probability, within float16 where it is stored."""
    teacher, student = logits(3)
    found = kbest_costs(teacher, student, 10, 5)
    assert (found["calibration_error_renormalized"] > 1e-3).all()
    assert found["calibration_error_ghost"].max() < 1e-12
    assert found["calibration_error_sampled"].max() < 2**-9


def test_all_senones_cost_nothing() -> None:
    """Whatever the form, the gradient is the full one, within float16 where it is stored."""
    teacher, student = logits(4)
    found = kbest_costs(teacher, student, SENONES, 5)
    np.testing.assert_allclose(found["mass"], 1)
    assert found["agreement"].all()
    for form in ("renormalized", "ghost", "sampled"):
        assert found[f"angle_{form}"].max() < 0.2


def test_drawn_columns_are_fewer_than_all() -> None:
    """4 of 20, and one of few; a single column is the best."""
    assert [num_drawn(k) for k in (1, 2, 5, 10, 20, 40)] == [0, 1, 1, 2, 4, 8]


MODEL_FORMS = {
    TEACHER: LstmConfig(1, 8, bidirectional=True, look_ahead=0, dropout=0.0),
    STUDENT: LstmConfig(1, 8, bidirectional=False, look_ahead=1, dropout=0.0),
}
CONFIG = TargetsConfig(6, 100, 3)
NUM_SENONES = 25
CPU = torch.device("cpu")


def row(number: int) -> FeatureRow:
    features = np.random.default_rng(number).normal(size=(40, NUM_BINS)).astype(np.float16)
    placement = (None, "DP1", "DP2")[number % 3]
    about = f"u{number}", "s", 400, "2026-01-01T00:00:00+00:00", "a.flac", "", None, placement
    return FeatureRow(*about, features)


@pytest.fixture
def run(tmp_path: Path) -> tuple[ObjectStore, str]:
    """Three shards of ten utterances in three placements, and two models."""
    store, run_uri = ObjectStore((str(tmp_path),)), str(tmp_path)

    def put(step: StepRun) -> Manifest:
        tally = Tally(10, 4000)
        shards = [write_features([row(10 * n + each) for each in range(10)]) for n in range(3)]
        outputs = [
            step.context.put_output(str(n), ".parquet", data, tally)
            for n, data in enumerate(shards)
        ]
        return step.lossless(Tally(30, 12000), tuple(outputs))

    run_step(StepSpec(store, run_uri, features_step(UNLABELLED), {}), put)
    for seed, (name, form) in enumerate(MODEL_FORMS.items()):
        torch.manual_seed(seed)
        model = make_model(form, NUM_SENONES).eval()
        # Weights of a trained model's size, so that frames are neither sure nor uniform.
        model.load_state_dict({key: 4 * value for key, value in model.state_dict().items()})
        trained = TrainedModel(model, torch.zeros(NUM_SENONES))
        run_step(
            StepSpec(store, run_uri, model_step(name), {}),
            lambda step, trained=trained: store_model(step, trained, Tally(), {}, Tally()),
        )
    return store, run_uri


def measured(run: tuple[ObjectStore, str], config: TargetsConfig = CONFIG) -> StepResult:
    """The costs of the run's own teacher."""
    teachers = trained_teachers(*run, {TEACHER: MODEL_FORMS[TEACHER]})
    return measure_kbest_costs(*run, config, teachers, MODEL_FORMS[STUDENT], CPU)


def shards_of(store: ObjectStore, run_uri: str) -> Manifest:
    return read_manifest(store, run_uri, features_step(UNLABELLED))


def test_means_are_those_of_the_sampled_frames(run: tuple[ObjectStore, str]) -> None:
    """Placements add up to all; the recipe's k is among those measured; a second call finds it."""
    result = measured(run)
    found = result.manifest.statistics
    assert not result.was_finished
    assert list(found["by_placement"]) == sorted(["DP1", "DP2", WITHOUT_PLACEMENT])
    assert list(found["all"]["k"]) == ["1", "5", "6", "10", "20"]
    counts = [each["num_frames"] for each in found["by_placement"].values()]
    assert sum(counts) == found["all"]["num_frames"] > 0
    for k, means in found["all"]["k"].items():
        parts = found["by_placement"].values()
        total = sum(each["num_frames"] * each["k"][k]["mass"] for each in parts)
        assert means["mass"] == pytest.approx(total / sum(counts))
        assert 0 < means["mass"] < 1
    again = measured(run)
    assert again.was_finished
    assert again.manifest.to_bytes() == result.manifest.to_bytes()


def test_the_sample_is_bounded_and_drawn_by_hash(
    run: tuple[ObjectStore, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the order of the shards; each placement has its share, and at least one."""
    shards = shards_of(*run).outputs
    everything = sample_utterances(*run, shards, CONFIG)
    assert len(everything) == 30
    monkeypatch.setattr(kbest_sample, "MAX_UTTERANCES", 4)
    few = [each.row.utterance_id for each in sample_utterances(*run, shards, CONFIG)]
    back = [each.row.utterance_id for each in sample_utterances(*run, shards[::-1], CONFIG)]
    assert few == back
    assert len(few) == 12
    monkeypatch.setattr(kbest_sample, "NUM_FRAMES", 3 * 2 * 13)
    assert len(sample_utterances(*run, shards, CONFIG)) == 6
    monkeypatch.setattr(kbest_sample, "NUM_FRAMES", 1)
    assert len(sample_utterances(*run, shards, CONFIG)) == 3
    monkeypatch.setattr(kbest_sample, "MAX_SHARDS", 1)
    monkeypatch.setattr(kbest_sample, "NUM_FRAMES", 10_000)
    shard = {each.row.utterance_id for each in sample_utterances(*run, shards, CONFIG)}
    assert len(shard) == 10


def test_pieces_of_utterances_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not depend on draws is the same for any length of pieces."""
    generator = np.random.default_rng(0)
    teacher, student = generator.normal(size=(2, 40, NUM_SENONES)).astype(np.float32)
    monkeypatch.setattr(kbest_sample, "PIECE_FRAMES", 7)
    sums = kbest_sample.CostSums()
    kbest_sample.add_costs([sums], teacher, student, 6, 2**64 - 1)
    means = sums.means()["k"]["6"]
    whole = kbest_costs(teacher, student, 6, 0)
    assert means["mass"] == pytest.approx(whole["mass"].mean())
    assert means["angle_renormalized"] == pytest.approx(whole["angle_renormalized"].mean())


class FickleSource:
    """FickleSource has no audio of u3 and u4, both in rooms of their own, nor of u6 in none."""

    engines = ()

    def frames_of(self, rows: Sequence[FeatureRow]) -> Iterator[FramesAt | TeacherFailure]:
        for row, frames in zip(rows, FEATURES.frames_of(rows), strict=True):
            gone = row.utterance_id in ("u3", "u4", "u6")
            yield TeacherFailure("audio: gone") if gone else frames


def test_a_users_teacher_is_measured_on_what_it_labels(run: tuple[ObjectStore, str]) -> None:
    """Utterances that it cannot hear, fails at or makes infinite are counted and left out."""
    left_out = {4: ValueError("no such word"), 9: float("inf")}
    calls = 0

    def label(utterances: list[Tensor]) -> list[Tensor]:
        nonlocal calls
        calls += 1
        found = left_out.get(calls, 0.0)
        if isinstance(found, ValueError):
            raise found
        ranks = torch.arange(NUM_SENONES).repeat(len(utterances[0]), 1)
        return [ranks * 0.5 + found]

    own = OwnTeacherConfig(factory="my_teachers:ranks")
    teachers = CostedTeachers(lambda _: [label], (), FickleSource(), own)
    result = measure_kbest_costs(*run, CONFIG, teachers, MODEL_FORMS[STUDENT], CPU)
    found = result.manifest.statistics
    assert sum(found["without_teacher"].values()) == 5
    assert calls == 27
    odds = np.exp(0.5 * np.arange(NUM_SENONES))
    for k in (1, 5, 6, 10, 20):
        mass = odds[-k:].sum() / odds.sum()
        assert found["all"]["k"][str(k)]["mass"] == pytest.approx(mass, rel=1e-6)
    # Another teacher is another step's.
    other = replace(teachers, config=OwnTeacherConfig(factory="my_teachers:other"))
    with pytest.raises(ValueError, match="use another --run"):
        measure_kbest_costs(*run, CONFIG, other, MODEL_FORMS[STUDENT], CPU)


def test_an_error_of_a_runs_own_teacher_ends_the_step(run: tuple[ObjectStore, str]) -> None:
    """It is no utterance's fault: nothing is written."""

    def label(_: list[Tensor]) -> list[Tensor]:
        raise MemoryError("12 GB")

    teachers = CostedTeachers(lambda _: [label], ())
    with pytest.raises(MemoryError, match="12 GB"):
        measure_kbest_costs(*run, CONFIG, teachers, MODEL_FORMS[STUDENT], CPU)
    assert not measured(run).was_finished


def test_the_teacher_may_hear_the_clearest_version(run: tuple[ObjectStore, str]) -> None:
    """As targets do; another setting is another step's."""
    measured(run)
    with pytest.raises(ValueError, match="use another --run"):
        measured(run, replace(CONFIG, versions="clearest"))
