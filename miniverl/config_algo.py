"""The `algo` section of the config: which objective, and its numbers.

Algorithms are data: a file of `conf/algo/` names an advantage, a loss, an aggregation and what else it needs.
Names are Literals here, because this room lies below `algos`; a test equates them with the registries' keys.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic import ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from miniverl.config_supervised import WITH_REFERENCE, PreferenceConfig, Rows

_strict = ConfigDict(extra="forbid", allow_inf_nan=False)

Divergence = Literal["forward_kl", "reverse_kl", "jsd", "skew_kl", "skew_rkl", "tvd"]
Advantage = Literal[
    "grpo", "grpo_passk", "rloo", "rloo_vectorized", "grpo_vectorized", "reinforce_plus_plus",
    "reinforce_plus_plus_baseline", "opo", "gpg",
]
PolicyLossName = Literal[
    "vanilla", "gspo", "geo_mean", "cispo", "sapo", "dppo_tv", "dppo_kl", "dro", "gpg", "reinforce"
]
Aggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
KlEstimator = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "k3+"]

GROUP_BASELINES = ("grpo", "grpo_passk", "rloo", "rloo_vectorized", "grpo_vectorized",
                   "reinforce_plus_plus_baseline", "opo", "gpg")
"""Advantages that compare a response with the others of its prompt."""


@dataclass(frozen=True, config=_strict)
class PolicyConfig:
    """A policy-gradient algorithm. Definitions and sources: miniverl/algos/."""

    advantage: Advantage = "grpo"
    norm_by_std: bool = True
    """Divide a group's centred rewards by their standard deviation (`false`: Dr.GRPO)."""
    gamma: PositiveFloat = 1.0
    """Discount per token (`reinforce_plus_plus`)."""
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
    kl: KlEstimator | None = None
    """Add kl_coef × this estimate of KL(student ‖ reference) to the loss; needs the reference role. None = no
    reference. `k1` is refused: as a loss its expected gradient is 0."""
    kl_coef: NonNegativeFloat = 0.001
    entropy_coef: float = 0.0
    """Subtract entropy_coef × the student's entropy from the loss."""
    epochs: PositiveInt = 1
    """Passes over one rollout batch."""
    mini_batches: PositiveInt = 1
    """Optimizer steps per pass: the rollout batch is cut into this many."""
    allow_groups_of_one: bool = False
    """Run a group baseline with rollout.n=1, where the baseline is 0 and the raw reward is the advantage."""


@dataclass(frozen=True, config=_strict)
class AlgoConfig:
    name: Literal["gkd", "sft", "policy_gradient", "preference", "pretrain", "kd"] = "gkd"
    """What is minimised: a divergence from a teacher on the student's responses (`gkd`) or on the dataset's,
    with the teacher's targets kept on disk (`kd`), the dataset's NLL, a policy-gradient loss on rewards
    (`policy` says which), a loss over preferred and other responses (`preference` says which), or the NLL of
    raw texts."""
    divergence: Divergence = "jsd"
    """GKD's per-token divergence between teacher p and student q; see miniverl.algos.divergences."""
    beta: float = 0.5
    """Interpolation of `jsd`: 0 is forward KL exactly, 1 reverse KL exactly."""
    alpha: float = 0.1
    """Mixing share of `skew_kl` and `skew_rkl`."""
    lam: float = 1.0
    """Share of samples whose response the student writes; the others take the dataset's (drawn per
    sample)."""
    teacher_top_k: PositiveInt | None = None
    """None = the teacher's full distribution; k = its k most likely tokens plus one bucket for the rest."""
    cache_dir: str = "runs/teacher-targets"
    """Where `kd` keeps what the teacher said; runs with the same teacher, data and settings share it."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """Read where name=policy_gradient."""
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    """Read where name=preference."""
    strict_on_policy: bool = True
    """Refuse top-k/top-p filters in training rollouts: the loss takes the unfiltered distribution."""
    loss_chunk_tokens: PositiveInt = 512
    """Tokens whose logits exist at one time: peak memory of the loss is a few times this × vocabulary."""

    @property
    def supervised(self) -> bool:
        """It learns from the dataset alone: no rollout, no n of them per prompt."""
        return self.name in ("sft", "preference", "pretrain", "kd")

    @property
    def tempered(self) -> bool:
        """The loss takes distributions at rollout.temperature; the others' is 1."""
        return self.name not in ("sft", "preference", "pretrain")

    @property
    def needs_teacher(self) -> bool:
        return self.name in ("gkd", "kd")

    @property
    def needs_reference(self) -> bool:
        """The loss compares with the starting student."""
        if self.name == "preference":
            return self.preference.loss in WITH_REFERENCE
        return self.name == "policy_gradient" and self.policy.kl is not None

    @property
    def rows(self) -> Rows:
        """What is read of a training row."""
        if self.name == "pretrain":
            return "texts"
        if self.name == "preference":
            return "labels" if self.preference.loss == "kto" else "pairs"
        return "responses" if self.supervised or self.lam < 1 else "prompts"

    @property
    def epochs(self) -> int:
        """Passes over one rollout batch."""
        return self.policy.epochs if self.name == "policy_gradient" else 1

    @property
    def updates_per_epoch(self) -> int:
        """Optimizer steps of one pass."""
        return self.policy.mini_batches if self.name == "policy_gradient" else 1
