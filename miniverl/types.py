"""The stages of one batch, one frozen type each: Prompt → Rollout → Batch (→ Targets).

Sequences stay ragged: a Batch is a flat concatenation, never a padded rectangle. Padding happens inside one
function (`miniverl.models.forward`), so nothing else in the house knows on which side it is.

Shape legend: N sequences · S tokens of all sequences, end to end · M trained tokens (mask = 1) · K top-k · H
hidden
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

import numpy as np
import torch

FinishReason = Literal["stop", "length"]
"""`stop`: a stop id was sampled (and is the last response token) · `length`: the token budget ran out."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One occurrence of a prompt: two draws of the same text are two Prompts with different `uid`.

    >>> Prompt(uid="addition/12#0", token_ids=(3, 7, 5), text="12+9=", answer="21").reference_ids is None
    True
    """

    uid: str
    """Unique per occurrence (`<row>#<epoch>`); sampling noise and grouping hang on it, never on the text."""
    token_ids: tuple[int, ...]
    text: str
    answer: str | None = None
    """Ground truth for the scorer; None where the data has none."""
    reference_ids: tuple[int, ...] | None = None
    """The dataset's own response, stop id included: what SFT trains on, and the share 1 - λ of GKD."""
    reference_mask: tuple[int, ...] | None = None
    """Which tokens of `reference_ids` are trained; None = all of them."""
    rejected_ids: tuple[int, ...] | None = None
    """Preference pairs: the response that `reference_ids` is preferred to."""
    rejected_mask: tuple[int, ...] | None = None
    desirable: bool | None = None
    """Labelled responses: the verdict on `reference_ids`."""
    documents: tuple[tuple[int, ...], ...] = ()
    """Pre-training: the token ids of raw texts that share a row; `token_ids` is empty then."""
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """A prompt with one response. It has no advantage and no reward it was not given: those are later stages.

    >>> r = Rollout(uid="a#0", sample=1, prompt_ids=np.array([3, 7]), response_ids=np.array([5, 2]),
    ...             mask=np.array([1, 1]), log_probs=np.array([-0.1, -0.7]), version=(4, 4), finish="stop")
    >>> len(r), r.rewards
    (4, {})
    """

    uid: str
    """Of the prompt occurrence, hence of the group: rollouts of one group share it, and no others do."""
    sample: int
    """0 … n-1 within the group."""
    prompt_ids: np.ndarray
    response_ids: np.ndarray
    mask: np.ndarray
    """1 = a token that is trained; 0 = tool output and the like. As long as `response_ids`."""
    log_probs: np.ndarray
    """Natural logs under the distribution actually sampled from (temperature and filters applied)."""
    version: tuple[int, int]
    """Lowest and highest weight version that produced tokens of it."""
    finish: FinishReason
    source: Literal["student", "dataset"] = "student"
    rewards: Mapping[str, float] = field(default_factory=dict)
    """What each reward function said, by its name."""
    reward: float | None = None
    """What is learned from: the functions' weighted sum; None = no verdict (never 0)."""
    greedy_reward: float | None = None
    """The reward of the same prompt's greedy response, where an estimator compares with it (`remax`)."""

    def __post_init__(self) -> None:
        lengths = {len(self.response_ids), len(self.mask), len(self.log_probs)}
        if len(lengths) != 1:
            raise ValueError(
                f"rollout {self.uid}/{self.sample}: {len(self.response_ids)} response tokens, "
                f"{len(self.mask)} mask entries and {len(self.log_probs)} log-probs must be equally many"
            )

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    def truncated(self, max_response_length: int) -> Rollout:
        """The rollout with every per-token array cut to `max_response_length` (finish becomes `length` if
        cut)."""
        if len(self.response_ids) <= max_response_length:
            return self
        return replace(
            self,
            response_ids=self.response_ids[:max_response_length],
            mask=self.mask[:max_response_length],
            log_probs=self.log_probs[:max_response_length],
            finish="length",
        )


class _PerToken:
    """Targets: each tensor of them has one row per trained token."""

    __slots__ = ()

    def rows(self, index: torch.Tensor) -> Self:
        """The targets of the trained tokens at `index`; what is no tensor belongs to all of them."""
        this: Any = self
        held = {f.name: getattr(this, f.name) for f in fields(this)}
        return replace(this, **{name: x[index] for name, x in held.items() if isinstance(x, torch.Tensor)})


@dataclass(frozen=True, slots=True, eq=False)
class TopKTargets(_PerToken):
    """What a teacher says of each trained token: its K most likely ids and their log-probs (over the common
    vocabulary, at the run's temperature). The rest of its mass is the tail bucket."""

    ids_MK: torch.Tensor
    log_probs_MK: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class HiddenTargets(_PerToken):
    """The teacher's last hidden state before its head: the full distribution in H numbers instead of V.

    The head itself is handed over once per run (`Head`), because the teacher never changes.
    """

    hidden_MH: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PolicyTargets(_PerToken):
    """What a policy gradient needs of each trained token."""

    advantages_M: torch.Tensor
    old_log_probs_M: torch.Tensor
    """Of the actor before the update, at the run's temperature."""
    ref_log_probs_M: torch.Tensor | None = None
    """Of the reference; None where the loss has no KL term."""

    selected_M: torch.Tensor | None = None
    """1 = a token that `clip_cov` or `kl_cov` treats apart; None elsewhere."""
    weights_M: torch.Tensor | None = None
    """Factor of each token's loss: an off-policy correction; None = 1."""
    nll_weights_M: torch.Tensor | None = None
    """Weight of each token's NLL: 1 / (tokens of right responses in the mini-batch), 0 in wrong ones; None
    without that term."""


@dataclass(frozen=True, slots=True, eq=False)
class ValueTargets(_PerToken):
    """What a critic learns of each trained token."""

    returns_M: torch.Tensor
    old_values_M: torch.Tensor
    """Its own, before the update."""


@dataclass(frozen=True, slots=True, eq=False)
class OutcomeTargets(_PerToken):
    """What a process reward model learns of each response: whether it is right."""

    ref_log_probs_M: torch.Tensor
    outcomes_M: torch.Tensor
    """In [0, 1], the same for every token of a response."""


@dataclass(frozen=True, slots=True, eq=False)
class PreferenceTargets(_PerToken):
    """What a preference loss needs of each trained token: the verdict on its response, and the reference."""

    preferred_M: torch.Tensor
    """bool: the token belongs to a chosen (or desirable) response."""
    ref_log_probs_M: torch.Tensor | None = None
    """Of the reference, at temperature 1; None where the loss has none."""
    kl: float = 0.0
    """KTO's z₀, one number of the global batch."""


Targets = (
    TopKTargets | HiddenTargets | PolicyTargets | ValueTargets | OutcomeTargets | PreferenceTargets
)


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """An output head cut to the tokenizer's real vocabulary. logits = hidden @ weight.T + bias."""

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Sequences laid end to end.

    >>> b = Batch(token_ids_S=torch.tensor([3, 7, 5, 2, 9, 4]), lengths_N=torch.tensor([4, 2]),
    ...           mask_S=torch.tensor([0, 0, 1, 1, 0, 1]), rows=(0, 1), trained_tokens=3,
    ...           trained_sequences=2)
    >>> b.select([1]).token_ids_S.tolist(), b.select([1]).trained_tokens
    ([9, 4], 3)
    """

    token_ids_S: torch.Tensor
    lengths_N: torch.Tensor
    mask_S: torch.Tensor
    """1 where the token is a trained *target*: it is predicted from the position before it."""
    rows: tuple[int, ...]
    """Where each sequence stood in the global batch; a shard keeps them, so order can be restored."""
    trained_tokens: int
    """Trained tokens of the *global* batch, the loss's denominator; a shard or micro-batch keeps this
    number."""
    trained_sequences: int
    """Sequences of the global batch with at least one trained token; kept likewise."""
    targets: Targets | None = None
    units: tuple[int, ...] | None = None
    """For each sequence the number of the unit that it belongs to: a preference pair is one. No shard or
    micro-batch parts the sequences of a unit. None = each sequence is a unit of its own."""
    packed: bool = False
    """The sequences of a unit are laid end to end in one row, each attending to itself alone; otherwise every
    sequence has a row."""

    def __len__(self) -> int:
        return len(self.lengths_N)

    def trained_per_row(self) -> list[int]:
        """Trained tokens of each sequence; they sum to M."""
        return [int(part.sum()) for part in self.mask_S.split(self.lengths_N.tolist())]

    def select(self, index: Sequence[int]) -> Batch:
        """The sequences at `index`, in that order, with every per-token field cut alike."""
        starts = torch.cumsum(self.lengths_N, 0) - self.lengths_N
        spans = [slice(int(starts[i]), int(starts[i] + self.lengths_N[i])) for i in index]
        pick = (
            torch.cat([torch.arange(s.start, s.stop) for s in spans])
            if spans
            else torch.zeros(0, dtype=torch.long)
        )
        targets = self.targets
        if targets is not None:
            trained_at = torch.cumsum(self.mask_S, 0) - 1
            targets = targets.rows(trained_at[pick][self.mask_S[pick] == 1])
        return replace(
            self,
            token_ids_S=self.token_ids_S[pick],
            lengths_N=self.lengths_N[list(index)],
            mask_S=self.mask_S[pick],
            rows=tuple(self.rows[i] for i in index),
            targets=targets,
            units=None if self.units is None else tuple(self.units[i] for i in index),
        )
