"""Cross-entropies against their definitions, with a class of all other senones too."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax, softmax

from pipeline.kbest import KBest, retained_mass, select_kbest, soft_targets
from training.data.targets import GhostTargetRows
from training.models.losses import (
    ghost_cross_entropy,
    hard_cross_entropy,
    kbest_cross_entropy,
    num_correct,
)


def test_hard_cross_entropy_is_the_sum_over_labelled_frames() -> None:
    """Frames labelled -1 do not count; the others sum."""
    logits = torch.randn(2, 3, 5)
    labels = torch.tensor([[0, 1, -1], [4, -1, 2]])
    log_posteriors = torch.log_softmax(logits, -1)
    expected = -sum(
        log_posteriors[b, t, labels[b, t]] for b in range(2) for t in range(3) if labels[b, t] >= 0
    )
    torch.testing.assert_close(hard_cross_entropy(logits, labels), expected)


def test_kbest_cross_entropy_is_that_of_distributions_with_the_rest_left_out() -> None:
    """Against the dense cross-entropy of a softmax whose missing logits are -1e30 (003 V-C)."""
    generator = np.random.default_rng(0)
    teacher = (generator.normal(size=(7, 12)) * 3).astype(np.float32)
    kbest = select_kbest(teacher, 4)
    dense = np.full((7, 12), -1e30)
    np.put_along_axis(dense, kbest.senones.astype(int), kbest.logits.astype(float), axis=1)
    targets = torch.softmax(torch.from_numpy(dense), -1)
    student = torch.from_numpy(generator.normal(size=(1, 7, 12)).astype(np.float32))
    expected = -(targets * torch.log_softmax(student[0].double(), -1)).sum()
    senones = torch.from_numpy(kbest.senones.astype(np.int64))[None]
    probabilities = torch.from_numpy(soft_targets(kbest))[None]
    actual = kbest_cross_entropy(student, senones, probabilities)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def gradients(student: torch.Tensor, kbest: KBest) -> np.ndarray:
    """The loss's gradients by the student's logits, [frames, senones]."""
    logits = student.clone().requires_grad_()
    senones = torch.from_numpy(kbest.senones.astype(np.int64))[None]
    loss = kbest_cross_entropy(logits, senones, torch.from_numpy(soft_targets(kbest))[None])
    (found,) = torch.autograd.grad(loss, logits)
    return found[0].double().numpy()


def test_the_mean_gradient_with_a_drawn_tail_is_that_of_all_logits() -> None:
    """Within five standard errors of the draws themselves; renormalized k = 20 is far beyond."""
    generator, num = np.random.default_rng(0), 20_000
    teacher = generator.normal(size=(1, 60)).astype(np.float32)
    student = torch.from_numpy(generator.normal(size=(1, 1, 60)).astype(np.float32))
    exact = torch.softmax(student.double(), -1) - torch.softmax(torch.from_numpy(teacher), -1)
    drawn = select_kbest(np.repeat(teacher, num, axis=0), 20, 4, seed=1)
    found = gradients(student.expand(1, num, 60), drawn)
    # float16 rounds logits, and with them probabilities of 0.1, by up to 2^-9.
    bound = 5 * found.std(axis=0) / np.sqrt(num) + 2**-9 * 0.1
    distance = np.abs(found.mean(axis=0) - exact[0, 0].numpy())
    assert (distance <= bound).all()
    renormalized = np.abs(gradients(student, select_kbest(teacher, 20))[0] - exact[0, 0].numpy())
    assert (renormalized > bound).all()
    assert np.linalg.norm(renormalized) > 10 * np.linalg.norm(distance)


def test_a_frame_is_correct_where_no_senone_is_better() -> None:
    """A tie with another senone counts; the count is of numbers, and differentiates nothing."""
    logits = torch.tensor([[[1.0, 1.0, 0.0], [0.0, 2.0, 1.0]]], requires_grad=True)
    for labels, correct in (([0, 1], 2), ([1, 1], 2), ([2, 1], 1), ([2, 0], 0), ([-1, -1], 0)):
        count = num_correct(logits, torch.tensor([labels]))
        assert (int(count), count.requires_grad) == (correct, False)


SENONES, K = 30, 5


def targets(num_frames: int, k: int = K, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact probabilities of the k best of random frames, [1, frames, k] in float64."""
    teacher = softmax(np.random.default_rng(seed).normal(size=(num_frames, SENONES)) * 2, axis=1)
    best = np.argsort(-teacher, axis=1)[:, :k]
    kept = np.take_along_axis(teacher, best, axis=1)
    return torch.from_numpy(best)[None], torch.from_numpy(kept)[None]


def students(num_frames: int, seed: int = 1) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(1, num_frames, SENONES)))


@given(st.integers(0, 1000), st.integers(1, SENONES))
def test_the_loss_is_that_of_its_definition(seed: int, k: int) -> None:
    """Against NumPy in float64: k best by themselves, and the sums of all others."""
    senones, kept = targets(6, k, seed)
    student = students(6, seed + 1)
    posteriors = np.exp(log_softmax(student[0].numpy(), axis=1))
    expected = 0.0
    for frame in range(6):
        of_best = posteriors[frame, senones[0, frame].numpy()]
        t = kept[0, frame].numpy()
        rest = np.delete(posteriors[frame], senones[0, frame].numpy()).sum()
        expected -= (t * np.log(of_best)).sum()
        expected -= (1 - t.sum()) * np.log(rest) if k < SENONES else 0.0
    assert float(ghost_cross_entropy(student, senones, kept)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("k", [1, K, SENONES - 1, SENONES])
def test_gradients_are_those_of_differences(k: int) -> None:
    """By torch's own check in float64, with a frame of padding among the others."""
    senones, kept = targets(4, k)
    kept[0, 2], senones[0, 2] = 0, 0
    student = students(4).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda given: ghost_cross_entropy(given, senones, kept), student
    )


def gradient(student: torch.Tensor, senones: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    given = student.clone().requires_grad_()
    (found,) = torch.autograd.grad(ghost_cross_entropy(given, senones, kept), given)
    return found


def test_the_optimum_has_the_teachers_head_and_any_tail() -> None:
    """No gradient where the best have their t and all others together 1 - a, in whatever shares.

    The renormalized loss has one there: it moves the missing mass into the head.
    """
    senones, kept = targets(8)
    posteriors = np.random.default_rng(3).dirichlet(np.full(SENONES, 0.3), size=8)[None]
    best = senones.numpy()
    np.put_along_axis(posteriors, best, 0, axis=2)
    posteriors *= (1 - kept.sum(-1, keepdim=True).numpy()) / posteriors.sum(-1, keepdims=True)
    np.put_along_axis(posteriors, best, kept.numpy(), axis=2)
    student = torch.from_numpy(np.log(np.maximum(posteriors, 1e-300)))
    assert gradient(student, senones, kept).abs().max() < 1e-12
    given = student.clone().requires_grad_()
    loss = kbest_cross_entropy(given, senones, kept / kept.sum(-1, keepdim=True))
    (renormalized,) = torch.autograd.grad(loss, given)
    assert renormalized.abs().max() > 0.01


def test_with_all_senones_it_is_full_distillation() -> None:
    """Loss and gradient p - t of the teacher's whole distribution."""
    senones, kept = targets(7, SENONES)
    student = students(7)
    full = torch.zeros(1, 7, SENONES, dtype=torch.float64).scatter(-1, senones, kept)
    expected = -(full * torch.log_softmax(student, -1)).sum()
    torch.testing.assert_close(ghost_cross_entropy(student, senones, kept), expected)
    expected_gradient = torch.softmax(student, -1) - full
    torch.testing.assert_close(gradient(student, senones, kept), expected_gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [K, SENONES])
def test_a_student_that_is_sure_has_finite_gradients(dtype: torch.dtype, k: int) -> None:
    """Its head's posteriors round to 1; missing mass still pulls, at the full rate."""
    senones, kept = targets(3, k)
    student = torch.zeros(1, 3, SENONES).scatter(-1, senones[..., :1], 200.0).to(dtype)
    found = gradient(student, senones, kept.float())
    assert torch.isfinite(found).all()
    if k < SENONES:
        missing = 1 - kept.sum(-1)
        outside = found.double().scatter(-1, senones, 0.0).sum(-1)
        torch.testing.assert_close(outside, -missing, rtol=2**-7, atol=1e-6)


def test_padding_adds_nothing() -> None:
    """A frame whose probabilities are all 0 has neither loss nor gradient."""
    senones, kept = targets(5)
    student = students(5)
    alone = ghost_cross_entropy(student[:, :3], senones[:, :3], kept[:, :3])
    kept[:, 3:], senones[:, 3:] = 0, 0
    torch.testing.assert_close(ghost_cross_entropy(student, senones, kept), alone)
    assert not gradient(student, senones, kept)[:, 3:].any()


def test_stored_targets_are_the_teachers_own_probabilities() -> None:
    """Within float16's rounding, summing to the retained mass, and never to more than one."""
    logits = (np.random.default_rng(2).normal(size=(50, 40)) * 4).astype(np.float32)
    kbest = select_kbest(logits, 8)
    found = GhostTargetRows.of_kbest(kbest)
    exact = -np.sort(-softmax(logits.astype(np.float64), axis=1), axis=1)[:, :8]
    np.testing.assert_allclose(found, exact, rtol=2**-8, atol=1e-6)
    np.testing.assert_allclose(found.sum(axis=1), retained_mass(kbest), rtol=1e-6)
    assert (GhostTargetRows.of_kbest(select_kbest(logits, 40)).sum(axis=1) <= 1 + 1e-6).all()
