"""The policy-gradient loss of one micro-batch: log-probs of the actor, token losses, KL and entropy terms.

Which algorithm it is, is the config's business; every formula is `algos`'.

Shape legend: N sequences · T most trained tokens of one · M trained tokens of all
"""

from __future__ import annotations

import torch
from torch import Tensor

from miniverl.algos import kl, policy_losses
from miniverl.algos.policy_losses import FIXED_AGGREGATION, ClipSettings
from miniverl.config import Config
from miniverl.config_policy import PolicyConfig
from miniverl.metrics import Mean, Metric, Sum
from miniverl.models.load import LoadedModel
from miniverl.types import Batch, PolicyTargets
from miniverl.workers.layout import Layout
from miniverl.workers.log_probs import differentiable_log_probs


def policy_loss(
    model: LoadedModel, batch: Batch, config: Config, kl_coef: float
) -> tuple[Tensor, dict[str, Metric]]:
    """The micro-batch's share of the mini-batch's loss (0-dim, differentiable), and its metrics.

    kl_coef: the weight that may be adapted (algo.policy.kl_target): of `ppo_kl`, else of the reference's KL.
    """
    policy, targets = config.algo.policy, batch.targets
    if not isinstance(targets, PolicyTargets):
        raise ValueError("a policy gradient needs advantages and old log-probs; the batch carries none")
    log_probs_M, entropy_M = differentiable_log_probs(model, batch, config, config.rollout.temperature)
    layout = Layout(batch, log_probs_M.detach(), config.rollout.max_response_length)
    log_probs_NT, old_NT = layout.padded(log_probs_M), layout.padded(targets.old_log_probs_M)
    found = policy_losses.LOSSES[policy.loss](
        log_probs_NT,
        old_NT,
        layout.padded(targets.advantages_M),
        layout.mask_NT,
        _clip(policy, kl_coef, None if targets.selected_M is None else layout.padded(targets.selected_M)),
    )
    loss_NT = found.loss_NT if targets.weights_M is None else found.loss_NT * layout.padded(targets.weights_M)
    loss = layout.reduced(loss_NT, FIXED_AGGREGATION.get(policy.loss, policy.aggregation))
    tokens = len(entropy_M)
    metrics: dict[str, Metric] = {
        "actor/pg_loss": Sum(float(loss.detach())),
        "actor/entropy": Mean(float(entropy_M.detach().sum()), tokens),
        # the losses without a ratio do not report it themselves, and an early stop looks at it
        "actor/ppo_kl": Mean(float((old_NT - log_probs_NT.detach()).sum()), tokens),
        **{name: Mean(float(total.detach()), tokens) for name, total in found.metrics.items()},
    }
    if policy.entropy_coef:
        loss = loss - policy.entropy_coef * layout.reduced(layout.padded(entropy_M), policy.aggregation)
    for term, told in (
        _reference_kl(log_probs_NT, targets, layout, policy, kl_coef),
        _positive_nll(log_probs_NT, targets, layout, policy),
    ):
        loss, metrics = loss + term, {**metrics, **told}
    return loss, metrics


Term = tuple[Tensor | float, dict[str, Metric]]
"""What is added to a loss, and its metrics; 0 and none where the algorithm has no such term."""


def _reference_kl(
    log_probs_NT: Tensor, targets: PolicyTargets, layout: Layout, policy: PolicyConfig, kl_coef: float
) -> Term:
    if policy.kl is None or targets.ref_log_probs_M is None:
        return 0.0, {}
    kl_NT = kl.ESTIMATORS[policy.kl](log_probs_NT, layout.padded(targets.ref_log_probs_M))
    weight = policy.kl_coef if policy.loss == "ppo_kl" else kl_coef
    measured = Mean(float((kl_NT.detach() * layout.mask_NT).sum()), len(targets.ref_log_probs_M))
    return weight * layout.reduced(kl_NT, policy.aggregation), {"actor/kl_loss": measured}


def _positive_nll(
    log_probs_NT: Tensor, targets: PolicyTargets, layout: Layout, policy: PolicyConfig
) -> Term:
    if targets.nll_weights_M is None:
        return 0.0, {}
    weights_NT = layout.padded(targets.nll_weights_M)
    nll_NT = torch.where(weights_NT > 0, -log_probs_NT, 0.0)
    measured = Mean(float(nll_NT.detach().sum()), float((weights_NT > 0).sum()))
    return policy.positive_nll_coef * (weights_NT * nll_NT).sum(), {"actor/positive_nll": measured}


def _clip(policy: PolicyConfig, kl_coef: float, selected_NT: Tensor | None) -> ClipSettings:
    return ClipSettings(
        low=policy.clip_low,
        high=policy.clip_high,
        dual=policy.dual_clip,
        dro_beta=policy.dro_beta,
        ppo_kl_coef=kl_coef if policy.loss == "ppo_kl" else policy.ppo_kl_coef,
        selected_NT=selected_NT,
    )
