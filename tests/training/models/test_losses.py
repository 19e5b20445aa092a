"""Cross-entropies against their definitions."""

import numpy as np
import torch

from pipeline.kbest import KBest, select_kbest, soft_targets
from training.models.losses import hard_cross_entropy, kbest_cross_entropy, num_correct


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


def test_correct_frames_are_counted_without_padding() -> None:
    """A frame without label is never right."""
    logits = torch.eye(3)[None]
    assert num_correct(logits, torch.tensor([[0, 2, 2]])) == 2
    assert num_correct(logits, torch.tensor([[0, -1, 2]])) == 2


def test_a_frame_is_correct_where_no_senone_is_better() -> None:
    """A tie with another senone counts; the count is of numbers, and differentiates nothing."""
    logits = torch.tensor([[[1.0, 1.0, 0.0], [0.0, 2.0, 1.0]]], requires_grad=True)
    for labels, correct in (([0, 1], 2), ([1, 1], 2), ([2, 1], 1), ([2, 0], 0), ([-1, -1], 0)):
        count = num_correct(logits, torch.tensor([labels]))
        assert (int(count), count.requires_grad) == (correct, False)
