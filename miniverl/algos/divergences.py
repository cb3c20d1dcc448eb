"""Divergences between teacher p and student q over one discrete distribution per token.

Each takes log-probs and returns its value and `q · ∂value/∂q`, from which the gradient with respect to the
student's logits follows for every one of them: dz = (q·g) − q · Σ(q·g). Terms of q·g that are a multiple of
q cancel there and are left out. Softmax, chunks, top-k and denominators are `objectives` and `chunked`'s
business.

Shape legend: C tokens of a chunk · V outcomes (the vocabulary, or K top tokens + 1 tail bucket)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ValueAndSlope = tuple[Tensor, Tensor]


def forward_kl(log_p_CV: Tensor, log_q_CV: Tensor) -> ValueAndSlope:
    """KL(p‖q) = Σ p log(p/q), gradient q − p. Source: Hinton et al. 2015, as named in GKD (arXiv
    2306.13649)."""
    p_CV = log_p_CV.exp()
    return (p_CV * (log_p_CV - log_q_CV)).sum(-1), -p_CV


def reverse_kl(log_p_CV: Tensor, log_q_CV: Tensor) -> ValueAndSlope:
    """KL(q‖p) = Σ q log(q/p), gradient q[log(q/p) − KL(q‖p)]. Source: MiniLLM (arXiv 2306.08543)."""
    q_log_ratio_CV = log_q_CV.exp() * (log_q_CV - log_p_CV)
    return q_log_ratio_CV.sum(-1), q_log_ratio_CV


def jsd(log_p_CV: Tensor, log_q_CV: Tensor, beta: float) -> ValueAndSlope:
    """β KL(p‖m) + (1−β) KL(q‖m) with m = βp + (1−β)q. Source: GKD (arXiv 2306.13649), eq. 1.

    β = 0 is forward KL and β = 1 reverse KL *exactly*. That is a convention, the limit of JSD/β and
    JSD/(1−β): the raw JSD tends to 0 at both ends, so values just inside (0, 1) are far smaller than those
    at the ends.
    """
    if beta == 0.0:
        return forward_kl(log_p_CV, log_q_CV)
    if beta == 1.0:
        return reverse_kl(log_p_CV, log_q_CV)
    log_m_CV = _log_mix(log_p_CV, beta, log_q_CV)
    q_term_CV = log_q_CV.exp() * (log_q_CV - log_m_CV)
    p_term_CV = log_p_CV.exp() * (log_p_CV - log_m_CV)
    return beta * p_term_CV.sum(-1) + (1 - beta) * q_term_CV.sum(-1), (1 - beta) * q_term_CV


def skew_kl(log_p_CV: Tensor, log_q_CV: Tensor, alpha: float) -> ValueAndSlope:
    """KL(p‖αp + (1−α)q). α = 0 is forward KL. Source: DistiLLM (arXiv 2402.03898), eq. 3."""
    log_m_CV = _log_mix(log_p_CV, alpha, log_q_CV)
    p_CV = log_p_CV.exp()
    return (p_CV * (log_p_CV - log_m_CV)).sum(-1), -(1 - alpha) * (log_p_CV + log_q_CV - log_m_CV).exp()


def skew_rkl(log_p_CV: Tensor, log_q_CV: Tensor, alpha: float) -> ValueAndSlope:
    """KL(q‖αq + (1−α)p). α = 0 is reverse KL. Source: DistiLLM (arXiv 2402.03898), eq. 4."""
    log_m_CV = _log_mix(log_q_CV, alpha, log_p_CV)
    q_log_ratio_CV = log_q_CV.exp() * (log_q_CV - log_m_CV)
    return q_log_ratio_CV.sum(-1), q_log_ratio_CV - alpha * (2 * log_q_CV - log_m_CV).exp()


def tvd(log_p_CV: Tensor, log_q_CV: Tensor) -> ValueAndSlope:
    """Total variation ½ Σ |p − q|. Source: f-distill (arXiv 2307.15190)."""
    q_CV = log_q_CV.exp()
    difference_CV = q_CV - log_p_CV.exp()
    return 0.5 * difference_CV.abs().sum(-1), 0.5 * q_CV * difference_CV.sign()


def _log_mix(log_a_CV: Tensor, share: float, log_b_CV: Tensor) -> Tensor:
    """log(share · a + (1 − share) · b), exact where one of them is far below the other."""
    if share == 0.0:
        return log_b_CV
    if share == 1.0:
        return log_a_CV
    s = log_a_CV.new_tensor(share)
    return torch.logaddexp(log_a_CV + s.log(), log_b_CV + (1 - s).log())


Divergence = Callable[..., ValueAndSlope]

DIVERGENCES: dict[str, Divergence] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "skew_kl": skew_kl,
    "skew_rkl": skew_rkl,
    "tvd": tvd,
}
PARAMETERS: dict[str, tuple[str, ...]] = {"jsd": ("beta",), "skew_kl": ("alpha",), "skew_rkl": ("alpha",)}
"""Which of a divergence's numbers come from the config; the others have none."""
