"""The `algo` section of the config: which objective, and its numbers."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass

from miniverl.config_policy import PolicyConfig

_strict = ConfigDict(extra="forbid", allow_inf_nan=False)

Divergence = Literal["forward_kl", "reverse_kl", "jsd", "skew_kl", "skew_rkl", "tvd"]


@dataclass(frozen=True, config=_strict)
class AlgoConfig:
    name: Literal["gkd", "sft", "policy_gradient"] = "gkd"
    """What is minimised: a divergence from a teacher, the dataset's NLL, or a policy-gradient loss on rewards
    (`policy` says which)."""
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
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """Read where name=policy_gradient."""
    strict_on_policy: bool = True
    """Refuse top-k/top-p filters in training rollouts: the loss takes the unfiltered distribution."""
    loss_chunk_tokens: PositiveInt = 512
    """Tokens whose logits exist at one time: peak memory of the loss is a few times this × vocabulary."""

    @property
    def needs_teacher(self) -> bool:
        """The objective asks a teacher: its whole distribution, or its log-probs of the sampled tokens."""
        return self.name == "gkd" or (self.name == "policy_gradient" and self.policy.uses_teacher)

    @property
    def epochs(self) -> int:
        """Passes over one rollout batch."""
        return self.policy.epochs if self.name == "policy_gradient" else 1

    @property
    def updates_per_epoch(self) -> int:
        """Optimizer steps of one pass."""
        return self.policy.mini_batches if self.name == "policy_gradient" else 1
