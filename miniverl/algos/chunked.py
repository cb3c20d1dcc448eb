"""Linear head → log-softmax → objective in chunks of tokens, with the gradient made on the way.

Of `[M, V]` only one chunk exists at a time: the forward pass computes a chunk's logits, its loss and its
logits' gradient, and folds that at once into the gradients of hidden states and head (three matrix products
per chunk, none twice). Which loss it is, is the objective's business.

Shape legend: M trained tokens · C tokens of a chunk · V vocabulary · H hidden
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miniverl.algos.objectives import Objective, head_log_probs
from miniverl.types import Head


@dataclass(frozen=True, slots=True)
class LossResult:
    loss: Tensor
    """0-dim: Σ value / denominator. Its backward gives the gradient of hidden states and head."""
    total: float
    """Σ value over the tokens, not divided."""
    sums: dict[str, float]


def token_loss(
    hidden_MH: Tensor,
    head: Head,
    objective: Objective,
    *,
    temperature: float,
    denominator: float,
    chunk_tokens: int,
) -> LossResult:
    """Mean of `objective` over trained tokens, chunk by chunk.

    Args:
        hidden_MH: last hidden states at the positions that predict the M trained tokens.
        head: the student's output head; its gradient is made if it requires one.
        denominator: trained tokens of the *global* batch; 0 gives loss 0, never NaN.
        chunk_tokens: tokens whose logits exist at one time.
    """
    totals: dict[str, Tensor] = {}
    loss = _ChunkedTokenLoss.apply(
        hidden_MH, head.weight_VH, head.bias_V, objective, temperature, denominator, chunk_tokens, totals
    )
    numbers = {name: float(value) for name, value in totals.items()}
    return LossResult(loss, numbers.pop("total", 0.0), numbers)


def token_log_probs(
    hidden_MH: Tensor, head: Head, ids_M: Tensor, *, temperature: float, chunk_tokens: int
) -> Tensor:
    """log q(token) `[M]` over the real vocabulary at `temperature`, a chunk's logits at a time."""
    parts = []
    for start in range(0, len(ids_M), chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        log_q_CV = head_log_probs(hidden_MH[rows], head, temperature)
        parts.append(log_q_CV.gather(-1, ids_M[rows].to(log_q_CV.device).unsqueeze(-1)).squeeze(-1))
    return torch.cat(parts) if parts else hidden_MH.new_zeros(0)


def log_probs_and_entropy(
    hidden_MH: Tensor, head: Head, ids_M: Tensor, *, temperature: float, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Differentiable log q(token) `[M]` and entropy of q `[M]` (nats), a chunk's logits at a time.

    For losses that hang on whole sequences, whose slopes are known only when all log-probs are: the backward
    pass computes a chunk's logits anew (one product more than `token_loss`) instead of keeping them.
    """
    return _ChunkedLogProbs.apply(hidden_MH, head.weight_VH, head.bias_V, ids_M, temperature, chunk_tokens)


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        ids_M: Tensor,
        temperature: float,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        ids_M = ids_M.to(hidden_MH.device)
        wide = torch.promote_types(hidden_MH.dtype, torch.float32)
        log_probs_M = hidden_MH.new_empty(len(ids_M), dtype=wide)
        entropy_M = torch.empty_like(log_probs_M)
        for start in range(0, len(ids_M), chunk_tokens):
            rows = slice(start, min(start + chunk_tokens, len(ids_M)))
            log_q_CV = head_log_probs(hidden_MH[rows], Head(weight_VH, bias_V), temperature)
            log_probs_M[rows] = log_q_CV.gather(-1, ids_M[rows].unsqueeze(-1)).squeeze(-1)
            entropy_M[rows] = -(log_q_CV.exp() * log_q_CV).sum(-1)
        ctx.save_for_backward(hidden_MH, weight_VH, bias_V, ids_M, entropy_M)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        return log_probs_M, entropy_M

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden_MH, weight_VH, bias_V, ids_M, entropy_M = ctx.saved_tensors
        slope_M, entropy_slope_M = grad_outputs
        grads = _Gradients(hidden_MH, weight_VH, bias_V)
        with_entropy = bool((entropy_slope_M != 0).any())
        for start in range(0, len(ids_M), ctx.chunk_tokens):
            rows = slice(start, min(start + ctx.chunk_tokens, len(ids_M)))
            log_q_CV = head_log_probs(hidden_MH[rows], Head(weight_VH, bias_V), ctx.temperature)
            slope_C1 = slope_M[rows].unsqueeze(-1)
            # ∂log q(y)/∂z = 1[y] − q and ∂H/∂z = −q (log q + H)
            if with_entropy:
                tilt_CV = (log_q_CV + entropy_M[rows].unsqueeze(-1)) * entropy_slope_M[rows].unsqueeze(-1)
                grad_CV = log_q_CV.exp_().mul_(-slope_C1 - tilt_CV)
            else:
                grad_CV = log_q_CV.exp_().mul_(-slope_C1)
            grad_CV.scatter_add_(-1, ids_M[rows].unsqueeze(-1), slope_C1)
            grads.add(grad_CV.div_(ctx.temperature), rows)
        return *grads.scaled(hidden_MH.new_ones(())), None, None, None


class _ChunkedTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        objective: Objective,
        temperature: float,
        denominator: float,
        chunk_tokens: int,
        totals: dict[str, Tensor],
    ) -> Tensor:
        scale = 1.0 / denominator if denominator else 0.0
        grads = _Gradients(hidden_MH, weight_VH, bias_V)
        loss = hidden_MH.new_zeros((), dtype=torch.promote_types(hidden_MH.dtype, torch.float32))
        for start in range(0, len(hidden_MH), chunk_tokens):
            rows = slice(start, min(start + chunk_tokens, len(hidden_MH)))
            token = objective(head_log_probs(hidden_MH[rows], Head(weight_VH, bias_V), temperature), rows)
            loss += token.value_C.sum()
            for name, value in token.sums.items():
                totals[name] = totals[name] + value if name in totals else value
            grads.add(token.grad_CV.mul_(scale / temperature), rows)
        totals["total"] = loss
        ctx.grads = grads
        return loss * scale

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        # Let go at once: head-sized gradients must not live as long as the result, and scaling is in place.
        grads: _Gradients | None = ctx.grads
        ctx.grads = None
        if grads is None:
            raise RuntimeError("token_loss can be differentiated only once: its gradient was made on the way")
        return *grads.scaled(grad_outputs[0]), None, None, None, None, None


class _Gradients:
    """Gradients of hidden states, head weight and bias, accumulated over chunks; None where none is
    wanted."""

    def __init__(self, hidden_MH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> None:
        # A sum over many chunks in bfloat16 would round small contributions away.
        wide = torch.promote_types(weight_VH.dtype, torch.float32)
        self._hidden, self._weight = hidden_MH, weight_VH
        self.hidden_MH = torch.empty_like(hidden_MH) if hidden_MH.requires_grad else None
        self.weight_VH = torch.zeros_like(weight_VH, dtype=wide) if weight_VH.requires_grad else None
        self.bias_V = (
            torch.zeros_like(bias_V, dtype=wide) if bias_V is not None and bias_V.requires_grad else None
        )

    def add(self, grad_CV: Tensor, rows: slice) -> None:
        if self.bias_V is not None:
            self.bias_V += grad_CV.sum(0)
        narrow_CV = grad_CV.to(self._weight.dtype)
        if self.hidden_MH is not None:
            torch.mm(narrow_CV, self._weight, out=self.hidden_MH[rows])
        if self.weight_VH is not None:
            if self.weight_VH.dtype == narrow_CV.dtype:
                self.weight_VH.addmm_(narrow_CV.T, self._hidden[rows])
            else:
                self.weight_VH += torch.mm(narrow_CV.T, self._hidden[rows])

    def scaled(self, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The three gradients times that of the loss (1 when the loss itself is what backward starts
        from)."""
        found = (self.hidden_MH, self.weight_VH, self.bias_V)
        likes = (self._hidden, self._weight, self._weight)
        return tuple(
            g if g is None else g.mul_(grad_output).to(like.dtype)  # type: ignore[return-value]
            for g, like in zip(found, likes, strict=True)
        )
