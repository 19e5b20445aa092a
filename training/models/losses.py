"""Cross-entropy with hard and with k-best soft targets, summed over frames (paper 003 II-C, V-C).

Sums, not means: the papers' gradient thresholds are for gradients summed over a minibatch.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional

NO_LABEL = -1


def hard_cross_entropy(
    logits: Float[Tensor, "batch frames senones"], labels: Int64[Tensor, "batch frames"]
) -> Float[Tensor, ""]:
    """Sum -log p(label) over the frames that have a label."""
    return functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL, reduction="sum"
    )


def kbest_cross_entropy(
    logits: Float[Tensor, "batch frames senones"],
    senones: Int64[Tensor, "batch frames k"],
    probabilities: Float[Tensor, "batch frames k"],
) -> Float[Tensor, ""]:
    """Sum the cross-entropy between the teacher's k best and the student (003 V-C).

    Senones that are not among the k best have probability 0; a frame without target has all 0.
    """
    # A logit's gradient is p_j - t_j, so senones beyond the k best are pushed down.
    log_posteriors = torch.log_softmax(logits, dim=-1).gather(-1, senones)
    return -(log_posteriors * probabilities).sum()


def ghost_cross_entropy(
    logits: Float[Tensor, "batch frames senones"],
    senones: Int64[Tensor, "batch frames k"],
    probabilities: Float[Tensor, "batch frames k"],
) -> Float[Tensor, ""]:
    """Sum the cross-entropy with the k best and one class of all other senones.

    - sum t log p - (1 - a) log(1 - sum p) over the k best, whose t are not renormalized and sum to
    a: the ghost token of arXiv 2503.16870. A frame without target has all t 0, and no loss.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_z = logits.logsumexp(-1)
    best = logits.gather(-1, senones)
    loss = ((log_z.unsqueeze(-1) - best) * probabilities).sum(-1)
    if senones.shape[-1] == logits.shape[-1]:
        return loss.sum()
    missing = (1 - probabilities.sum(-1)).clamp(min=0) * (probabilities[..., 0] > 0)
    # 1 - sum p would be 0, and its logarithm infinite, where the student is sure of its best.
    rest = logits.scatter(-1, senones, -torch.inf).logsumexp(-1)
    return (loss + missing * (log_z - rest)).sum()


def num_correct(
    logits: Float[Tensor, "batch frames senones"], labels: Int64[Tensor, "batch frames"]
) -> Int64[Tensor, ""]:
    """Count the labelled frames that have no better senone; the host does not wait for it.

    A label that ties with another senone counts as correct. In float32 hardly any frame ties; under
    precision bfloat16, whose logits have 8 bits, some 4 in 100 do.
    """
    logits = logits.detach()
    # A frame's largest logit alone takes a sixth of the time of its place.
    of_labels = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return ((of_labels == logits.amax(-1)) & (labels != NO_LABEL)).sum()
