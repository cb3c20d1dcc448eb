"""The `algo` section of the config: which objective, and its numbers."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass

from miniverl.config_policy import PolicyConfig
from miniverl.config_supervised import WITH_REFERENCE, PreferenceConfig, Rows

_strict = ConfigDict(extra="forbid", allow_inf_nan=False)

Divergence = Literal["forward_kl", "reverse_kl", "jsd", "skew_kl", "skew_rkl", "tvd"]


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
        """The objective asks a teacher: its whole distribution, or its log-probs of the sampled tokens."""
        return self.name in ("gkd", "kd") or (self.name == "policy_gradient" and self.policy.uses_teacher)

    @property
    def needs_reference(self) -> bool:
        """The loss compares with the starting student."""
        if self.name == "preference":
            return self.preference.loss in WITH_REFERENCE
        return self.name == "policy_gradient" and self.policy.uses_reference

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
