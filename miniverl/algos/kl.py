"""Per-token estimates of KL(student ‖ reference) from the sampled token alone (Schulman 2020, "Approximating
KL divergence").

As a *loss*, what counts is the estimate's expected gradient on policy: k1's is 0, k2's is that of the reverse
KL, k3's that of the forward KL. A name with `+` has the estimate's value and k2's gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

Estimator = Callable[[Tensor, Tensor], Tensor]


def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """log q − log p of the sampled token: unbiased, may be negative."""
    return log_probs - ref_log_probs


def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """|log q − log p|."""
    return (log_probs - ref_log_probs).abs()


def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """½ (log q − log p)²."""
    return 0.5 * (log_probs - ref_log_probs).square()


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """p/q − 1 − log(p/q): unbiased and never negative. Clamped to ±10, its exponent to ±20, as in verl."""
    difference = (ref_log_probs - log_probs).clamp(-20, 20)
    return (difference.exp() - difference - 1).clamp(-10, 10)


def _with_k2_gradient(estimator: Estimator, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    squared = k2(log_probs, ref_log_probs)
    return squared - squared.detach() + estimator(log_probs, ref_log_probs).detach()


ESTIMATORS: dict[str, Estimator] = {
    "kl": k1,
    "k1": k1,
    "abs": absolute,
    "mse": k2,
    "k2": k2,
    "low_var_kl": k3,
    "k3": k3,
    "k1+": partial(_with_k2_gradient, k1),
    "k3+": partial(_with_k2_gradient, k3),
}
