"""Rewards → advantages and returns per token. One function per estimator, by name in the dict at the foot.

A sequence's score is the sum of its token rewards; its group is its prompt *occurrence*. Groups of one have
baseline 0 and scale 1, as in verl, unless a docstring says otherwise.

Shape legend: N sequences · T tokens of the longest
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from miniverl.algos.aggregate import masked_whiten

EPSILON = 1e-6
SAME = 1e-6
"""Scores of a group that lie closer than this (relative to their size) are equal: float noise is no
signal."""


@dataclass(frozen=True, slots=True)
class Episode:
    """What estimators look at.

    >>> e = Episode(torch.tensor([[0.0, 1.0]]), torch.ones(1, 2), torch.tensor([0]))
    >>> e.scores_N.tolist()
    [1.0]
    """

    token_rewards_NT: Tensor
    mask_NT: Tensor
    """1 = a token that is trained."""
    group_N: Tensor
    values_NT: Tensor | None = None
    """Of the critic (`gae`)."""
    greedy_scores_N: Tensor | None = None
    """Score of the prompt's greedy response (`remax`)."""
    teacher_gap_NT: Tensor | None = None
    """log p(teacher) − log q(behaviour) of each sampled token (`opd`)."""
    process_rewards_NT: Tensor | None = None
    """Of the process reward model (`prime`)."""

    @property
    def scores_N(self) -> Tensor:
        return self.token_rewards_NT.sum(-1)


@dataclass(frozen=True, slots=True)
class Settings:
    gamma: float = 1.0
    lam: float = 1.0
    """GAE's λ of the policy."""
    lam_critic: float | None = None
    """GAE's λ of the critic's target; None = the same (VAPO: 1.0)."""
    length_adaptive: float | None = None
    """VAPO's α: λ = 1 − 1/(α·l) for a response of l trained tokens, at least 0, instead of `lam`."""
    norm_by_std: bool = True
    gpg_count: str = "scores"
    process_coef: float = 1.0
    outcome_coef: float = 1.0


@dataclass(frozen=True, slots=True)
class Advantages:
    advantages_NT: Tensor
    returns_NT: Tensor


Estimator = Callable[[Episode, Settings], Advantages]


def gae(episode: Episode, settings: Settings) -> Advantages:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv 1506.02438), whitened over the batch.

    Untrained tokens are skipped: what follows a token is the next *trained* one. VAPO (arXiv 2504.05118)
    takes another λ for the critic's target, and a λ of the policy that grows with length.

    Raises ValueError without values.
    """
    if episode.values_NT is None:
        raise ValueError("gae needs the critic's values")
    lam_N = torch.full_like(episode.scores_N, settings.lam)
    if settings.length_adaptive is not None:
        lengths_N = episode.mask_NT.sum(-1).clamp_min(1)
        lam_N = (1 - 1 / (settings.length_adaptive * lengths_N)).clamp_min(0)
    raw_NT = _gae(episode, episode.values_NT, settings.gamma, lam_N)
    target_NT = raw_NT
    if settings.lam_critic is not None:
        target_NT = _gae(
            episode, episode.values_NT, settings.gamma, torch.full_like(lam_N, settings.lam_critic)
        )
    returns_NT = target_NT + episode.values_NT
    return Advantages(masked_whiten(raw_NT, episode.mask_NT), _masked(returns_NT, episode.mask_NT))


def _gae(episode: Episode, values_NT: Tensor, gamma: float, lam_N: Tensor) -> Tensor:
    found_NT = torch.zeros_like(values_NT)
    next_value_N, last_N = torch.zeros_like(lam_N), torch.zeros_like(lam_N)
    for t in reversed(range(values_NT.shape[1])):
        trained_N = episode.mask_NT[:, t] == 1
        delta_N = episode.token_rewards_NT[:, t] + gamma * next_value_N - values_NT[:, t]
        last_N = torch.where(trained_N, delta_N + gamma * lam_N * last_N, last_N)
        next_value_N = torch.where(trained_N, values_NT[:, t], next_value_N)
        found_NT[:, t] = last_N
    return found_NT


def grpo(episode: Episode, settings: Settings) -> Advantages:
    """(R − mean of the group) / (its standard deviation + 1e-6) (Shao et al. 2024, arXiv 2402.03300).

    norm_by_std=False is Dr.GRPO (arXiv 2503.20783). A group of equal scores gets exactly 0.
    """
    scores_N = episode.scores_N
    centred_N, single_N, members_NN = _centred(episode)
    if settings.norm_by_std:
        squares_N = (members_NN * (scores_N[None] - (scores_N - centred_N)[:, None]).square()).sum(-1)
        std_N = (squares_N / (members_NN.sum(-1) - 1).clamp_min(1)).sqrt()
        centred_N = centred_N / (torch.where(single_N, 1.0, std_N) + EPSILON)
    return _outcome(centred_N, episode)


def grpo_passk(episode: Episode, settings: Settings) -> Advantages:
    """Only the best of a group: (R_best − R_second) / (std + 1e-6), the others 0 (Chen et al. 2025, arXiv
    2508.10751). Raises ValueError for a group of one."""
    scores_N = _finite(episode.scores_N)
    found_N = torch.zeros_like(scores_N)
    for group in episode.group_N.unique().tolist():
        index = torch.nonzero(episode.group_N == group).flatten()
        if len(index) < 2:
            raise ValueError("grpo_passk compares the best with the second best: a group of one has none")
        top, order = scores_N[index].topk(2)
        gap = top[0] - top[1]
        if settings.norm_by_std:
            gap = gap / (scores_N[index].std() + EPSILON)
        found_N[index[order[0]]] = gap
    return _outcome(found_N, episode)


def rloo(episode: Episode, settings: Settings, *, single_is_zero: bool = False) -> Advantages:
    """R − mean of the group's others (Ahmadian et al. 2024, arXiv 2402.14740). A group of one keeps R, or
    gets 0 with `single_is_zero`."""
    centred_N, single_N, members_NN = _centred(episode)
    size_N = members_NN.sum(-1)
    found_N = centred_N * size_N / (size_N - 1).clamp_min(1)
    return _outcome(torch.where(single_N, 0.0, found_N) if single_is_zero else found_N, episode)


def reinforce_plus_plus(episode: Episode, settings: Settings) -> Advantages:
    """Discounted rewards-to-go, whitened over the whole batch (Hu 2025, arXiv 2501.03262). Untrained tokens
    are passed through without a discount."""
    returns_NT = torch.zeros_like(episode.token_rewards_NT)
    running_N = torch.zeros_like(_finite(episode.scores_N))
    for t in reversed(range(returns_NT.shape[1])):
        trained_N = episode.mask_NT[:, t] == 1
        running_N = torch.where(
            trained_N, episode.token_rewards_NT[:, t] + settings.gamma * running_N, running_N
        )
        returns_NT[:, t] = running_N
    return Advantages(
        masked_whiten(returns_NT, episode.mask_NT), _masked(returns_NT, episode.mask_NT)
    )


def reinforce_plus_plus_baseline(episode: Episode, settings: Settings) -> Advantages:
    """R − mean of the group, whitened over the batch's trained tokens (arXiv 2501.03262)."""
    whitened_NT = masked_whiten(_outcome(_centred(episode)[0], episode).advantages_NT, episode.mask_NT)
    return Advantages(whitened_NT, whitened_NT.clone())


def remax(episode: Episode, settings: Settings) -> Advantages:
    """Rewards-to-go − score of the greedy response (Li et al. 2023, arXiv 2310.10505). Raises ValueError
    without greedy scores."""
    if episode.greedy_scores_N is None:
        raise ValueError("remax needs the score of each prompt's greedy response")
    rewards_NT = _masked(episode.token_rewards_NT, episode.mask_NT)
    _finite(episode.scores_N)
    returns_NT = rewards_NT.flip(-1).cumsum(-1).flip(-1)
    return Advantages(
        _masked(returns_NT - episode.greedy_scores_N[:, None], episode.mask_NT),
        _masked(returns_NT, episode.mask_NT),
    )


def opo(episode: Episode, settings: Settings) -> Advantages:
    """R − Σ l R / Σ l over the group, l = trained tokens (Hao et al. 2025, arXiv 2505.23585)."""
    scores_N, (_, single_N, members_NN) = episode.scores_N, _centred(episode)
    lengths_N = episode.mask_NT.sum(-1).to(scores_N)
    weight_N = (members_NN * lengths_N).sum(-1).clamp_min(EPSILON)
    baseline_N = (members_NN * (lengths_N * scores_N)).sum(-1) / weight_N
    return _outcome(_snapped(scores_N - torch.where(single_N, 0.0, baseline_N), scores_N), episode)


def gpg(episode: Episode, settings: Settings) -> Advantages:
    """(R − mean of the group) · N / #{scores ≠ 0} (Chu et al. 2025, arXiv 2504.02546; counted as in verl), or
    with gpg_count="advantages" as the paper reads: / #{advantages ≠ 0}."""
    scores_N, centred_N = episode.scores_N, _centred(episode)[0]
    counted_N = scores_N if settings.gpg_count == "scores" else centred_N
    share = len(scores_N) / max(1, int((counted_N != 0).sum()))
    return _outcome(centred_N * share, episode)


def opd(episode: Episode, settings: Settings) -> Advantages:
    """log p − log q of the sampled token, no discount: the policy gradient of −KL(q ‖ p) (on-policy
    distillation; k1 as a loss has gradient 0, as an advantage it is the reverse KL's). Raises ValueError
    without a teacher."""
    if episode.teacher_gap_NT is None:
        raise ValueError("opd needs the teacher's log-probs of the sampled tokens")
    gap_NT = _masked(episode.teacher_gap_NT, episode.mask_NT)
    return Advantages(gap_NT, gap_NT.clone())


def prime(episode: Episode, settings: Settings) -> Advantages:
    """RLOO of process and of outcome rewards, summed to rewards-to-go and whitened (Cui et al. 2025, PRIME,
    arXiv 2502.01456; as the recipe for verl: a token's baseline is built from the mean process reward of each
    response of the group). A group of one has no baseline.

    Raises ValueError without process rewards.
    """
    if episode.process_rewards_NT is None:
        raise ValueError("prime needs the process reward model's token rewards")
    process_NT = _masked(episode.process_rewards_NT, episode.mask_NT)
    members_NN = (episode.group_N[:, None] == episode.group_N[None]).to(process_NT)
    size_N = members_NN.sum(-1)
    means_N = process_NT.sum(-1) / episode.mask_NT.sum(-1).clamp_min(1)
    others_N = (size_N - 1).clamp_min(1)
    scale_N1 = torch.where(size_N > 1, size_N / others_N, 1.0)[:, None]
    baseline_N1 = torch.where(size_N > 1, (members_NN * means_N).sum(-1) / others_N, 0.0)[:, None]
    outcome = Episode(episode.token_rewards_NT, episode.mask_NT, episode.group_N)
    last_NT = episode.mask_NT * (episode.mask_NT.cumsum(-1) == episode.mask_NT.sum(-1, keepdim=True))
    rewards_NT = _masked(process_NT * scale_N1 - baseline_N1, episode.mask_NT) * settings.process_coef
    rewards_NT = rewards_NT + rloo(outcome, settings).advantages_NT * last_NT * settings.outcome_coef
    returns_NT = _masked(rewards_NT.flip(-1).cumsum(-1).flip(-1), episode.mask_NT)
    return Advantages(masked_whiten(returns_NT, episode.mask_NT), returns_NT)


def _centred(episode: Episode) -> tuple[Tensor, Tensor, Tensor]:
    """Scores minus their group's mean (a group of one: minus 0) `[N]`; who is alone `[N]`; who is with whom
    `[N, N]`."""
    scores_N = _finite(episode.scores_N)
    members_NN = (episode.group_N[:, None] == episode.group_N[None]).to(scores_N)
    size_N = members_NN.sum(-1)
    single_N = size_N == 1
    mean_N = torch.where(single_N, 0.0, (members_NN * scores_N).sum(-1) / size_N)
    return _snapped(scores_N - mean_N, scores_N), single_N, members_NN


def _snapped(difference_N: Tensor, scores_N: Tensor) -> Tensor:
    noise_N = SAME * scores_N.abs()
    return torch.where(difference_N.abs() <= noise_N, 0.0, difference_N)


def _finite(scores_N: Tensor) -> Tensor:
    bad = torch.nonzero(~torch.isfinite(scores_N)).flatten().tolist()
    if bad:
        raise ValueError(f"the rewards of rows {bad} are not finite: mask such rows before estimating")
    return scores_N


def _outcome(per_sequence_N: Tensor, episode: Episode) -> Advantages:
    """One number for all trained tokens of a sequence; tensors of their own, never views of it."""
    spread_NT = torch.where(episode.mask_NT == 1, per_sequence_N[:, None], 0.0)
    return Advantages(spread_NT, spread_NT.clone())


def _masked(values_NT: Tensor, mask_NT: Tensor) -> Tensor:
    return torch.where(mask_NT == 1, values_NT, 0.0)


ESTIMATORS: dict[str, Estimator] = {
    "gae": gae,
    "grpo": grpo,
    "grpo_vectorized": grpo,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "rloo_vectorized": partial(rloo, single_is_zero=True),
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "opo": opo,
    "gpg": gpg,
    "opd": opd,
    "prime": prime,
}
