"""The policy-gradient loss of one micro-batch: log-probs of the actor, token losses, KL and entropy terms.

Which algorithm it is, is the config's business; every formula is `algos`'.

Shape legend: N sequences · T most trained tokens of one · M trained tokens of all
"""

from __future__ import annotations

import torch
from torch import Tensor

from miniverl.algos import kl, policy_losses
from miniverl.algos.aggregate import aggregate
from miniverl.algos.chunked import log_probs_and_entropy
from miniverl.algos.policy_losses import FIXED_AGGREGATION, ClipSettings
from miniverl.config import Config
from miniverl.config_policy import PolicyConfig
from miniverl.metrics import Mean, Metric, Sum
from miniverl.models.forward import hidden_before_trained, trained_token_ids
from miniverl.models.load import LoadedModel
from miniverl.types import Batch, PolicyTargets


def policy_loss(
    model: LoadedModel, batch: Batch, config: Config, kl_coef: float
) -> tuple[Tensor, dict[str, Metric]]:
    """The micro-batch's share of the mini-batch's loss (0-dim, differentiable), and its metrics.

    kl_coef: the weight that may be adapted (algo.policy.kl_target): of `ppo_kl`, else of the reference's KL.
    """
    policy, targets = config.algo.policy, batch.targets
    if not isinstance(targets, PolicyTargets):
        raise ValueError("a policy gradient needs advantages and old log-probs; the batch carries none")
    log_probs_M, entropy_M = log_probs_and_entropy(
        hidden_before_trained(model.backbone, batch),
        model.head,
        trained_token_ids(batch),
        temperature=config.rollout.temperature,
        chunk_tokens=config.algo.loss_chunk_tokens,
    )
    per_row = batch.trained_per_row()

    def padded(flat_M: Tensor) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(flat_M.to(log_probs_M).split(per_row)), batch_first=True)

    def reduced(values_NT: Tensor, mode: str) -> Tensor:
        return aggregate(
            values_NT,
            mask_NT,
            mode,
            tokens=batch.trained_tokens,
            sequences=batch.trained_sequences,
            horizon=config.rollout.max_response_length,
        )

    mask_NT = padded(torch.ones_like(log_probs_M))
    log_probs_NT, old_NT = padded(log_probs_M), padded(targets.old_log_probs_M)
    found = policy_losses.LOSSES[policy.loss](
        log_probs_NT,
        old_NT,
        padded(targets.advantages_M),
        mask_NT,
        _clip(policy, kl_coef, None if targets.selected_M is None else padded(targets.selected_M)),
    )
    loss_NT = found.loss_NT if targets.weights_M is None else found.loss_NT * padded(targets.weights_M)
    tokens = sum(per_row)
    loss = reduced(loss_NT, FIXED_AGGREGATION.get(policy.loss, policy.aggregation))
    metrics: dict[str, Metric] = {
        "actor/pg_loss": Sum(float(loss.detach())),
        "actor/entropy": Mean(float(entropy_M.detach().sum()), tokens),
        # the losses without a ratio do not report it themselves, and an early stop looks at it
        "actor/ppo_kl": Mean(float(((old_NT - log_probs_NT.detach()) * mask_NT).sum()), tokens),
        **{name: Mean(float(total.detach()), tokens) for name, total in found.metrics.items()},
    }
    if policy.entropy_coef:
        loss = loss - policy.entropy_coef * reduced(padded(entropy_M), policy.aggregation)
    if policy.kl is not None and targets.ref_log_probs_M is not None:
        kl_NT = kl.ESTIMATORS[policy.kl](log_probs_NT, padded(targets.ref_log_probs_M))
        weight = policy.kl_coef if policy.loss == "ppo_kl" else kl_coef
        loss = loss + weight * reduced(kl_NT, policy.aggregation)
        metrics["actor/kl_loss"] = Mean(float((kl_NT.detach() * mask_NT).sum()), tokens)
    if targets.nll_weights_M is not None:
        weights_NT = padded(targets.nll_weights_M)
        nll_NT = torch.where(weights_NT > 0, -log_probs_NT, 0.0)
        loss = loss + policy.positive_nll_coef * (weights_NT * nll_NT).sum()
        metrics["actor/positive_nll"] = Mean(float(nll_NT.detach().sum()), float((weights_NT > 0).sum()))
    return loss, metrics


def _clip(policy: PolicyConfig, kl_coef: float, selected_NT: Tensor | None) -> ClipSettings:
    return ClipSettings(
        low=policy.clip_low,
        high=policy.clip_high,
        dual=policy.dual_clip,
        dro_beta=policy.dro_beta,
        ppo_kl_coef=kl_coef if policy.loss == "ppo_kl" else policy.ppo_kl_coef,
        selected_NT=selected_NT,
    )
