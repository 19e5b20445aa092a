"""The costs of k columns a frame against sums over senones, one after the other."""

import math

import numpy as np
import pytest
import torch

from training.models.losses import ghost_cross_entropy, kbest_cross_entropy
from training.targets.kbest_costs import FORMS, kbest_costs, num_drawn

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
        assert found.mass[frame] == pytest.approx(mass)
        assert found.agrees[frame] == (p.index(max(p)) in best)
        assert found.errors["renormalized"][frame] == pytest.approx(
            t[best[0]] / mass - t[best[0]], abs=1e-12
        )
        full = [a - b for a, b in zip(p, t, strict=True)]
        angle = degrees([a - b for a, b in zip(p, target, strict=True)], full)
        assert found.angles["renormalized"][frame] == pytest.approx(angle, abs=1e-4)


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
        np.testing.assert_allclose(found.angles[form], expected, atol=1e-4)


def test_only_the_renormalized_head_is_too_sure() -> None:
    """The other forms fit the teacher's best probability, within float16 where it is stored."""
    teacher, student = logits(3)
    found = kbest_costs(teacher, student, 10, 5)
    assert (found.errors["renormalized"] > 1e-3).all()
    assert found.errors["ghost"].max() < 1e-12
    assert found.errors["sampled"].max() < 2**-9


def test_all_senones_cost_nothing() -> None:
    """Whatever the form, the gradient is the full one, within float16 where it is stored."""
    teacher, student = logits(4)
    found = kbest_costs(teacher, student, SENONES, 5)
    np.testing.assert_allclose(found.mass, 1)
    assert found.agrees.all()
    for form in FORMS:
        assert found.angles[form].max() < 0.2


def test_drawn_columns_are_fewer_than_all() -> None:
    """4 of 20, and one of few; a single column is the best."""
    assert [num_drawn(k) for k in (1, 2, 5, 10, 20, 40)] == [0, 1, 1, 2, 4, 8]
