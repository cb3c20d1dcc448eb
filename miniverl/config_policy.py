"""The `algo.policy` section of the config: a policy-gradient algorithm as data.

A file of `conf/algo/` names an advantage, a loss, an aggregation and what else it needs. Names are Literals
here, because this room lies below `algos`; a test equates them with the registries' keys.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Le
from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from miniverl.errors import ConfigError

if TYPE_CHECKING:
    from miniverl.config import Config

_strict = ConfigDict(extra="forbid", allow_inf_nan=False)

Share = Annotated[float, Ge(0), Le(1)]
Advantage = Literal[
    "gae", "grpo", "grpo_passk", "rloo", "rloo_vectorized", "grpo_vectorized", "reinforce_plus_plus",
    "reinforce_plus_plus_baseline", "remax", "opo", "gpg", "opd", "prime",
]
PolicyLossName = Literal[
    "vanilla", "gspo", "geo_mean", "cispo", "sapo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl", "dro", "gpg",
    "reinforce", "importance_sampling", "ppo_kl",
]
Aggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
KlEstimator = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "k3+"]

GROUP_BASELINES = ("grpo", "grpo_passk", "rloo", "rloo_vectorized", "grpo_vectorized",
                   "reinforce_plus_plus_baseline", "opo", "gpg", "prime")
"""Advantages that compare a response with the others of its prompt."""
COVARIANCE = ("clip_cov", "kl_cov")
"""Losses that treat tokens of high covariance between log-probability and advantage apart."""


@dataclass(frozen=True, config=_strict)
class CriticConfig:
    """The value model of `advantage=gae`. Its weights start as model.critic's (None = the student's), with a
    new value head at 0; `optim` holds but for `lr`."""

    lr: PositiveFloat = 1e-4
    clip: PositiveFloat = 0.5
    """A value moves at most this far from the one before the update, before its loss stops falling."""
    epochs: PositiveInt = 1
    """Passes over one rollout batch, in algo.policy.mini_batches pieces each."""
    warmup_steps: NonNegativeInt = 0
    """So many first steps train the critic alone, on rollouts of the initial policy (VAPO's value
    pre-training)."""


@dataclass(frozen=True, config=_strict)
class ProcessRewardConfig:
    """The implicit process reward model of `advantage=prime`: a copy of the student, trained online to tell
    right responses from wrong ones; a token's reward is beta · (log π_φ − log π_ref)."""

    beta: PositiveFloat = 0.05
    lr: PositiveFloat = 1e-6
    process_coef: NonNegativeFloat = 1.0
    outcome_coef: NonNegativeFloat = 1.0


@dataclass(frozen=True, config=_strict)
class CorrectionConfig:
    """For engines whose probabilities are not the trainer's: w = π_trainer / π_engine, always detached."""

    old_log_probs: Literal["trainer", "engine"] = "trainer"
    """What the loss's ratio is taken against: recomputed by the trainer (decoupled), or the engine's own
    (bypass, a forward pass less)."""
    truncate: Literal["token", "sequence"] | None = None
    """Weigh each token's loss with min(w, cap) of the token, or of its whole response (product)."""
    cap: PositiveFloat = 2.0
    mask: Literal["token", "sequence"] | None = None
    """Leave out tokens (or responses, by their geometric mean) whose w lies outside [mask_low,
    mask_high]."""
    mask_low: PositiveFloat = 0.5
    mask_high: PositiveFloat = 2.0

    @property
    def active(self) -> bool:
        return self.truncate is not None or self.mask is not None


@dataclass(frozen=True, config=_strict)
class PolicyConfig:
    """A policy-gradient algorithm. Definitions and sources: miniverl/algos/."""

    advantage: Advantage = "grpo"
    norm_by_std: bool = True
    """Divide a group's centred rewards by their standard deviation (`false`: Dr.GRPO)."""
    gpg_count: Literal["scores", "advantages"] = "scores"
    """`gpg` rescales by the share of non-zero scores (as verl), or of non-zero advantages (the paper)."""
    gamma: PositiveFloat = 1.0
    """Discount per token (`reinforce_plus_plus`, `gae`)."""
    lam: Share = 1.0
    """GAE's λ of the policy."""
    lam_critic: Share | None = None
    """GAE's λ of the critic's target; None = `lam`."""
    length_adaptive: PositiveFloat | None = None
    """VAPO's α: λ = 1 − 1/(α·l) for a response of l tokens, in place of `lam`."""
    loss: PolicyLossName = "vanilla"
    aggregation: Aggregation = "token-mean"
    """How token losses become one number; denominators are those of the whole mini-batch. `geo_mean` and
    `sapo` define their own."""
    clip_low: PositiveFloat = 0.2
    """The ratio is clipped at 1 - clip_low …"""
    clip_high: PositiveFloat = 0.2
    """… and at 1 + clip_high (above clip_low: DAPO's clip-higher)."""
    dual_clip: PositiveFloat = 3.0
    """Bound of the ratio for negative advantages."""
    dro_beta: NonNegativeFloat = 0.1
    cov_ratio: Share = 0.0002
    """Share of a mini-batch's tokens that `clip_cov` and `kl_cov` treat apart (at least one)."""
    cov_low: float = 1.0
    cov_high: float = 5.0
    """`clip_cov` draws them among tokens whose covariance lies between these."""
    ppo_kl_coef: NonNegativeFloat = 0.1
    """Weight of KL(old ‖ new) in `ppo_kl` (the start value, if kl_target is set), of |log-ratio| in
    `kl_cov`."""
    positive_nll_coef: NonNegativeFloat = 0.0
    """Add this × the NLL of the responses that the accuracy metric calls right (VAPO: 0.1)."""
    kl: KlEstimator | None = None
    """Add kl_coef × this estimate of KL(student ‖ reference) to the loss; needs the reference role. None = no
    reference. `k1` is refused: as a loss its expected gradient is 0."""
    kl_in_reward: KlEstimator | None = None
    """Subtract kl_coef × this estimate from each token's reward instead."""
    kl_coef: NonNegativeFloat = 0.001
    kl_target: PositiveFloat | None = None
    """Adapt the coefficient so that the measured KL (per token) comes to this; None = it stays."""
    kl_horizon: PositiveInt = 10000
    """Sequences over which the coefficient may change by a fifth per unit of relative error, at most
    (Ziegler et al. 2019, arXiv 1909.08593)."""
    kl_stop: PositiveFloat | None = None
    """End a rollout batch's updates once KL(old ‖ new) of one of them exceeds this."""
    entropy_coef: float = 0.0
    """Subtract entropy_coef × the student's entropy from the loss."""
    teacher_coef: NonNegativeFloat = 0.0
    """Add this × (log p_teacher − log q) of each sampled token to its advantage: sampled reverse KL, on top
    of any estimator; needs a teacher. With advantage=opd it is all there is."""
    epochs: PositiveInt = 1
    """Passes over one rollout batch."""
    mini_batches: PositiveInt = 1
    """Optimizer steps per pass: the rollout batch is cut into this many."""
    allow_groups_of_one: bool = False
    """Run a group baseline with rollout.n=1, where the baseline is 0 and the raw reward is the advantage."""
    filter_groups: bool = False
    """Dynamic sampling (DAPO): learn only from prompts whose responses are neither all right nor all wrong by
    the accuracy metric, and generate until the step has trainer.prompts_per_step of them."""
    max_gen_batches: NonNegativeInt = 10
    """Most generations for one step; 0 = any number, within max_gen_s."""
    max_gen_s: PositiveFloat | None = None
    """Most seconds of generation for one step."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    prime: ProcessRewardConfig = field(default_factory=ProcessRewardConfig)

    @property
    def uses_reference(self) -> bool:
        return self.kl is not None or self.kl_in_reward is not None or self.advantage == "prime"

    @property
    def uses_teacher(self) -> bool:
        return self.teacher_coef > 0

    @property
    def uses_rewards(self) -> bool:
        return self.advantage != "opd"

    @property
    def actor_warmup_steps(self) -> int:
        """Steps in which the actor does not learn yet."""
        return self.critic.warmup_steps if self.advantage == "gae" else 0


def check_policy(c: Config) -> None:
    """Raises ConfigError for what would train nothing, train twice, or has nothing to learn from."""
    if c.algo.name != "policy_gradient":
        return
    if c.algo.lam != 1:
        raise ConfigError(f"algo.lam={c.algo.lam}: a policy gradient learns from the student's own responses "
                          "only; use algo.lam=1.")
    for check in (_groups, _kl, _batches, _teacher, _correction):
        check(c, c.algo.policy)
    scored_by_answer = c.algo.policy.uses_rewards and not c.reward.functions
    if c.data.source == "files" and c.data.answer_key is None and scored_by_answer:
        raise ConfigError("algo.name=policy_gradient learns from a score against an answer: name its column "
                          "with data.answer_key=….")


def _groups(c: Config, p: PolicyConfig) -> None:
    if p.advantage in ("grpo_passk", "prime") and c.rollout.n == 1:
        raise ConfigError(f"algo.policy.advantage={p.advantage} has no other response to compare with in a "
                          "group of rollout.n=1; use rollout.n=4 or more.")
    if p.advantage in GROUP_BASELINES and c.rollout.n == 1 and not p.allow_groups_of_one:
        raise ConfigError(f"algo.policy.advantage={p.advantage} compares the responses of one prompt, and "
                          "rollout.n=1 gives it nothing to compare: use rollout.n=4 or more, or accept raw "
                          "rewards with algo.policy.allow_groups_of_one=true.")
    if p.filter_groups and c.rollout.n == 1:
        raise ConfigError("algo.policy.filter_groups=true keeps prompts with right and wrong responses, and "
                          "with rollout.n=1 there are none; use rollout.n=4 or more.")
    if p.filter_groups and not p.uses_rewards:
        raise ConfigError("algo.policy.filter_groups=true looks at rewards, and advantage=opd has none; use "
                          "algo.policy.filter_groups=false.")
    if p.filter_groups and p.max_gen_batches == 0 and p.max_gen_s is None:
        raise ConfigError("algo.policy.max_gen_batches=0 would generate for ever where every group is all "
                          "right or all wrong: set algo.policy.max_gen_s=SECONDS, or a number of batches.")


def _kl(c: Config, p: PolicyConfig) -> None:
    if p.kl in ("k1", "kl"):
        raise ConfigError(f"algo.policy.kl={p.kl}: as a loss its expected gradient is 0, so it would train "
                          "nothing. Use low_var_kl (k3), k2, or k1+ (k1's value with k2's gradient).")
    if p.kl is not None and p.kl_in_reward is not None:
        raise ConfigError(f"algo.policy.kl={p.kl} and kl_in_reward={p.kl_in_reward} would take the same KL "
                          "twice: set one of them to null.")
    if p.kl_target is not None and p.kl is None and p.kl_in_reward is None and p.loss != "ppo_kl":
        raise ConfigError(f"algo.policy.kl_target={p.kl_target} adapts a KL's coefficient, and there is no "
                          "KL: set algo.policy.kl=low_var_kl, or kl_in_reward=kl, or loss=ppo_kl.")
    if p.loss == "ppo_kl" and (p.kl is not None or p.kl_in_reward is not None) and p.kl_target is not None:
        raise ConfigError(f"algo.policy.kl_target={p.kl_target} could steer ppo_kl's coefficient or that of "
                          "the KL to the reference, not both: set algo.policy.kl=null, or kl_target=null.")


def _batches(c: Config, p: PolicyConfig) -> None:
    if not 0 < p.clip_low <= 1:
        raise ConfigError(f"algo.policy.clip_low={p.clip_low} must lie between 0 and 1.")
    if p.cov_low >= p.cov_high:
        raise ConfigError(f"algo.policy.cov_low={p.cov_low} must be below cov_high={p.cov_high}.")
    rows = c.trainer.prompts_per_step * c.rollout.n
    if p.mini_batches > rows:
        raise ConfigError(f"algo.policy.mini_batches={p.mini_batches} is more than the {rows} sequences of a "
                          "step (trainer.prompts_per_step × rollout.n).")
    if p.actor_warmup_steps >= c.trainer.steps:
        raise ConfigError(f"algo.policy.critic.warmup_steps={p.actor_warmup_steps} leaves the policy no step "
                          f"of trainer.steps={c.trainer.steps}.")


def _teacher(c: Config, p: PolicyConfig) -> None:
    if p.advantage == "opd" and not p.uses_teacher:
        raise ConfigError("algo.policy.advantage=opd is the teacher's signal alone, and teacher_coef=0 "
                          "leaves none of it: use algo.policy.teacher_coef=1.")


def _correction(c: Config, p: PolicyConfig) -> None:
    wanted = p.correction
    if wanted.old_log_probs == "engine" and wanted.active:
        raise ConfigError("algo.policy.correction.old_log_probs=engine already takes the loss's ratio "
                          f"against the engine; truncate={wanted.truncate} and mask={wanted.mask} would "
                          "correct a second time. Use old_log_probs=trainer, or set both to null.")
    if wanted.mask_low >= wanted.mask_high:
        raise ConfigError(f"algo.policy.correction.mask_low={wanted.mask_low} must be below "
                          f"mask_high={wanted.mask_high}.")
