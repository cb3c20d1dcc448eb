"""What is minimised at one trained token, as objects called chunk by chunk with the student's log-probs.

An objective answers with its value, its gradient with respect to the student's (temperature-scaled) logits,
and sums worth logging. Heads, chunks, denominators and autograd are `chunked`'s business; nothing here knows
a model.

Shape legend: M trained tokens of a batch · C of them in a chunk · V vocabulary · K top-k · H hidden
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from miniverl.algos.divergences import Divergence
from miniverl.types import Head, HiddenTargets, TopKTargets


@dataclass(frozen=True, slots=True)
class TokenLoss:
    value_C: Tensor
    grad_CV: Tensor
    """∂value/∂logits, each token for itself."""
    sums: dict[str, Tensor]
    """0-dim sums over the chunk's tokens, by metric name."""


class Objective(Protocol):
    def __call__(self, log_q_CV: Tensor, rows: slice) -> TokenLoss:
        """`rows` says which of the M trained tokens the chunk holds. `log_q_CV` may be overwritten."""
        ...


@dataclass(frozen=True, slots=True)
class FullDistillation:
    """A divergence over the full vocabulary; the teacher's distribution is rebuilt from its hidden states.

    Student and teacher are both divided by `temperature`, and both normalise over the same V ids (heads cut
    alike).
    """

    divergence: Divergence
    targets: HiddenTargets
    head: Head
    temperature: float

    def __call__(self, log_q_CV: Tensor, rows: slice) -> TokenLoss:
        hidden_CH = self.targets.hidden_MH[rows].to(self.head.weight_VH.device)
        log_p_CV = head_log_probs(hidden_CH, self.head, self.temperature)
        value_C, qg_CV = self.divergence(log_p_CV, log_q_CV)
        return TokenLoss(value_C, _logit_gradient(qg_CV, log_q_CV), {})


@dataclass(frozen=True, slots=True)
class TopKDistillation:
    """A divergence over K + 1 outcomes: the teacher's K most likely ids, and one bucket for all the others.

    Merging outcomes can only lose divergence (data processing): 0 ≤ value ≤ the full one, with equality at K
    = V. Without the bucket "forward KL" has its minimum P·log P < 0, no divergence at all.
    """

    divergence: Divergence
    targets: TopKTargets

    def __call__(self, log_q_CV: Tensor, rows: slice) -> TokenLoss:
        targets = self.targets.rows(torch.arange(rows.start, rows.stop, device=self.targets.ids_MK.device))
        ids_CK = targets.ids_MK.to(log_q_CV.device)
        top_p_CK = targets.log_probs_MK.to(log_q_CV)
        top_q_CK = log_q_CV.gather(-1, ids_CK)
        sums = {
            "distillation/teacher_mass": top_p_CK.exp().sum(),
            "distillation/student_mass": top_q_CK.exp().sum(),
            "distillation/overlap": _overlap(ids_CK, log_q_CV).sum(),
        }
        k = ids_CK.shape[-1]
        if k == log_q_CV.shape[-1]:  # nothing is left for a bucket
            value_C, qg_CK = self.divergence(top_p_CK, top_q_CK)
            grad_CV = torch.zeros_like(log_q_CV)
        else:
            # The student's tail is summed over its own ids: 1 − mass is 0 in float32 for a confident student,
            # and the shares below would be x / 0.
            rest_CV = log_q_CV.scatter(-1, ids_CK, -torch.inf)
            tail_q_C1 = rest_CV.logsumexp(-1, keepdim=True)
            log_p, log_q = torch.cat([top_p_CK, _tail(top_p_CK)], -1), torch.cat([top_q_CK, tail_q_C1], -1)
            value_C, qg_CK = self.divergence(log_p, log_q)
            # The bucket's slope is shared by its ids in proportion to their share of the student's tail.
            grad_CV = rest_CV.sub_(tail_q_C1).exp_().mul_(qg_CK[:, k:])
        grad_CV.scatter_(-1, ids_CK, qg_CK[:, :k])
        grad_CV -= log_q_CV.exp_().mul_(qg_CK.sum(-1, keepdim=True))
        return TokenLoss(value_C, grad_CV, sums)


@dataclass(frozen=True, slots=True)
class NegativeLogLikelihood:
    """−log q(y) of given tokens: supervised fine-tuning."""

    ids_M: Tensor

    def __call__(self, log_q_CV: Tensor, rows: slice) -> TokenLoss:
        ids_C1 = self.ids_M[rows].to(log_q_CV.device).unsqueeze(-1)
        value_C = -log_q_CV.gather(-1, ids_C1).squeeze(-1)
        grad_CV = log_q_CV.exp_()
        grad_CV.scatter_add_(-1, ids_C1, -torch.ones_like(ids_C1, dtype=grad_CV.dtype))
        return TokenLoss(value_C, grad_CV, {})


def head_log_probs(hidden_CH: Tensor, head: Head, temperature: float) -> Tensor:
    """log softmax(head(hidden) / temperature) `[C, V]` in at least float32."""
    logits_CV = torch.nn.functional.linear(hidden_CH, head.weight_VH, head.bias_V)
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    if temperature != 1.0:
        logits_CV /= temperature
    return torch.log_softmax(logits_CV, -1)


def _logit_gradient(qg_CV: Tensor, log_q_CV: Tensor) -> Tensor:
    """(q·g) − q Σ(q·g), see `divergences`."""
    return qg_CV - log_q_CV.exp_().mul_(qg_CV.sum(-1, keepdim=True))


def _tail(log_top_CK: Tensor) -> Tensor:
    """log(1 − Σ exp): the mass of everything outside the top k.

    Floored at the precision of that difference: below it the sent log-probs say nothing, and a smaller floor
    would charge a student's tail against a made-up zero, beyond the full divergence.
    """
    mass_C1 = log_top_CK.exp().sum(-1, keepdim=True)
    return (1 - mass_C1).clamp_min(torch.finfo(log_top_CK.dtype).eps).log()


def _overlap(ids_CK: Tensor, log_q_CV: Tensor) -> Tensor:
    """Share of the teacher's top k that is also in the student's top k."""
    own_CK = log_q_CV.topk(ids_CK.shape[-1], -1).indices
    return (ids_CK.unsqueeze(-1) == own_CK.unsqueeze(-2)).any(-1).to(log_q_CV.dtype).mean(-1)
