"""What an update learns from where there is no rollout: dataset responses → the batch with its targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from miniverl.algos.preference import reference_kl
from miniverl.config import Config, RunError
from miniverl.controller.group import WorkerGroup
from miniverl.data.target_cache import TargetCache
from miniverl.pack import pack, pack_rows, pack_together
from miniverl.types import Batch, PreferenceTargets, Prompt, Rollout
from miniverl.workers.actor import Actor
from miniverl.workers.reference import Reference


@dataclass(frozen=True)
class Imitation:
    """The responses themselves."""

    def __call__(
        self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]
    ) -> tuple[Batch, dict[str, float]]:
        return pack(rollouts), {}


@dataclass(frozen=True)
class CachedTeacher:
    """What a teacher once said of every trained token."""

    cache: TargetCache

    def __call__(
        self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]
    ) -> tuple[Batch, dict[str, float]]:
        return replace(pack(rollouts), targets=self.cache.targets(rollouts)), {}


@dataclass(frozen=True)
class PackedTexts:
    """Raw texts, each prompt's in one row."""

    row_tokens: int

    def __call__(
        self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]
    ) -> tuple[Batch, dict[str, float]]:
        batch = pack_rows(rollouts)
        return batch, {
            "packing/fill": int(batch.lengths_N.sum()) / (len(prompts) * self.row_tokens),
            "packing/documents_per_row": len(rollouts) / len(prompts),
        }


@dataclass(frozen=True)
class Preference:
    """Which response of a pair is preferred (or the verdict on a lone one), and the reference's log-probs."""

    config: Config
    actor: WorkerGroup
    reference: WorkerGroup | None
    """None = the actor's own base, under its adapter; asked only where the loss compares with a reference."""

    def __call__(
        self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]
    ) -> tuple[Batch, dict[str, float]]:
        verdicts = {p.uid: p.desirable for p in prompts}
        for r in rollouts:
            if not r.mask.any():
                raise RunError(
                    f"row {r.uid}: a response has no trained token within "
                    f"rollout.max_response_length={self.config.rollout.max_response_length}, so there is "
                    "nothing to prefer. Raise the limit, or remove the row."
                )
        batch = pack_together(rollouts)
        preferred = [r.sample == 0 if verdicts[r.uid] is None else bool(verdicts[r.uid]) for r in rollouts]
        preferred_M = torch.tensor(preferred).repeat_interleave(torch.tensor(batch.trained_per_row()))
        if not self.config.algo.needs_reference:
            return replace(batch, targets=PreferenceTargets(preferred_M)), {}
        reference_M = torch.cat(self._reference_log_probs(batch))
        if self.config.algo.preference.loss != "kto":
            return replace(batch, targets=PreferenceTargets(preferred_M, reference_M)), {}
        kl = self._kl(rollouts)
        targets = PreferenceTargets(preferred_M, reference_M, kl)
        return replace(batch, targets=targets), {"preference/reference_kl": kl}

    def _kl(self, rollouts: Sequence[Rollout]) -> float:
        """KTO's distance to the reference, from each prompt with the response of the one after it."""
        shifted = [*rollouts[1:], rollouts[0]]
        crossed = pack(
            [
                replace(other, prompt_ids=own.prompt_ids)
                for own, other in zip(rollouts, shifted, strict=True)
            ]
        )
        now, then = self.actor.rows(Actor.log_probs, crossed, 1.0), self._reference_log_probs(crossed)
        lengths = torch.tensor([len(part) for part in now])
        ratios = torch.stack([(a - b).sum() for a, b in zip(now, then, strict=True)])
        return reference_kl(ratios / lengths if self.config.algo.preference.length_normalised else ratios)

    def _reference_log_probs(self, batch: Batch) -> list[Tensor]:
        """One tensor per response, at temperature 1."""
        if self.reference is None:
            return self.actor.rows(Actor.reference_log_probs, batch, 1.0)
        return self.reference.rows(Reference.log_probs, batch, 1.0)
