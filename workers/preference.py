"""The preference loss of one micro-batch: log-probs of the actor, summed by response, paired, compared.

Every formula is `algos.preference`'s.

Shape legend: N sequences · M trained tokens of all
"""

from __future__ import annotations

import torch
from torch import Tensor

from miniverl.algos.preference import PAIR_LOSSES, LabelSettings, PairSettings, Side, kto
from miniverl.config import Config
from miniverl.metrics import Mean, Metric, Sum
from miniverl.models.load import LoadedModel
from miniverl.types import Batch, PreferenceTargets
from miniverl.workers.log_probs import differentiable_log_probs


def preference_loss(model: LoadedModel, batch: Batch, config: Config) -> tuple[Tensor, dict[str, Metric]]:
    """The micro-batch's share of the mean over the global batch's pairs or labelled responses (0-dim,
    differentiable), and its metrics. Log-probs are taken at temperature 1.
    """
    targets = batch.targets
    if not isinstance(targets, PreferenceTargets):
        raise ValueError("a preference loss needs verdicts on its responses; the batch carries none")
    log_probs_M, entropy_M = differentiable_log_probs(model, batch, config, 1.0)
    per_row = batch.trained_per_row()
    responses = _summed(log_probs_M, targets, per_row)
    firsts = torch.tensor(per_row).cumsum(0) - torch.tensor(per_row)
    preferred = targets.preferred_M[firsts].to(log_probs_M.device)
    lone = config.algo.preference.loss == "kto"
    loss, metrics = (_labelled if lone else _paired)(responses, preferred, batch, config)
    metrics["actor/entropy"] = Mean(float(entropy_M.detach().sum()), len(entropy_M))
    return loss, metrics


def _paired(
    responses: Side, preferred_N: Tensor, batch: Batch, config: Config
) -> tuple[Tensor, dict[str, Metric]]:
    p = config.algo.preference
    units = torch.tensor(batch.units or batch.rows, device=preferred_N.device)
    chosen_P, rejected_P = torch.nonzero(preferred_N).flatten(), torch.nonzero(~preferred_N).flatten()
    if not torch.equal(units[chosen_P], units[rejected_P]):
        raise ValueError("a pair was parted: a chosen and a rejected response must lie side by side")
    settings = PairSettings(p.beta, p.label_smoothing, p.length_normalised, p.margin)
    found = PAIR_LOSSES[p.loss](_at(responses, chosen_P), _at(responses, rejected_P), settings)
    pairs = len(chosen_P)
    loss = found.loss.sum() / (batch.trained_sequences / 2)
    margins_P = found.chosen_rewards - found.rejected_rewards
    return loss, {
        "actor/preference_loss": Sum(float(loss.detach())),
        "preference/accuracy": Mean(float((margins_P > 0).sum()), pairs),
        "preference/margin": Mean(float(margins_P.sum()), pairs),
        "preference/reward_chosen": Mean(float(found.chosen_rewards.sum()), pairs),
        "preference/reward_rejected": Mean(float(found.rejected_rewards.sum()), pairs),
        **_log_prob_metrics(responses, preferred_N),
    }


def _labelled(
    responses: Side, preferred_N: Tensor, batch: Batch, config: Config
) -> tuple[Tensor, dict[str, Metric]]:
    p, targets = config.algo.preference, batch.targets
    assert isinstance(targets, PreferenceTargets)
    settings = LabelSettings(p.beta, p.desirable_weight, p.undesirable_weight, p.length_normalised)
    found = kto(responses, preferred_N, targets.kl, settings)
    loss = found.loss.sum() / batch.trained_sequences
    good, bad = found.rewards[preferred_N], found.rewards[~preferred_N]
    right = (good > p.beta * targets.kl).sum() + (bad < p.beta * targets.kl).sum()
    return loss, {
        "actor/preference_loss": Sum(float(loss.detach())),
        "preference/accuracy": Mean(float(right), len(preferred_N)),
        "preference/reward_chosen": Mean(float(good.sum()), len(good)),
        "preference/reward_rejected": Mean(float(bad.sum()), len(bad)),
        **_log_prob_metrics(responses, preferred_N),
    }


def _log_prob_metrics(responses: Side, preferred_N: Tensor) -> dict[str, Metric]:
    """Mean log-probs of a token: a loss may widen the margin while it makes both responses unlikely."""
    log_probs_N = responses.log_probs.detach()
    return {
        f"preference/token_log_prob_{name}": Mean(
            float(log_probs_N[which].sum()), int(responses.lengths[which].sum())
        )
        for name, which in (("chosen", preferred_N), ("rejected", ~preferred_N))
    }


def _summed(log_probs_M: Tensor, targets: PreferenceTargets, per_row: list[int]) -> Side:
    """Per response: Σ log-probs of the actor and of the reference, and the number of trained tokens."""
    if not all(per_row):
        raise ValueError("a preference needs at least one trained token in each response")
    ref_M = targets.ref_log_probs_M
    ref_M = torch.zeros_like(log_probs_M) if ref_M is None else ref_M.to(log_probs_M)
    lengths_N = torch.tensor(per_row, device=log_probs_M.device)
    own, ref = (torch.stack([part.sum() for part in flat.split(per_row)]) for flat in (log_probs_M, ref_M))
    return Side(own, ref, lengths_N)


def _at(side: Side, index: Tensor) -> Side:
    return Side(side.log_probs[index], side.ref_log_probs[index], side.lengths[index])
