"""Checks miniverl's algorithms against recorded answers: `python tests/golden.py FILE…`.

A file holds one batch's inputs and, by name, what another implementation answered (verl 0.9.1 for those in
tests/golden/): advantages, policy losses with gradients and metrics, KL estimators, aggregations, value loss.
Values count where the mask is 1. Prints each row that disagrees with its largest error, then
`N rows agree, M disagree`; exits 1 if any disagrees or a recorded name is unknown.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from miniverl.algos import advantages, kl, policy_losses
from miniverl.algos.advantages import Episode, Settings
from miniverl.algos.aggregate import AGGREGATIONS, aggregate
from miniverl.algos.policy_losses import FIXED_AGGREGATION, ClipSettings
from miniverl.algos.value import value_loss

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Row:
    name: str
    error: float
    """Largest |ours − theirs| ÷ max(1, |theirs|); NaN where a name or number is missing."""
    note: str = ""

    @property
    def agrees(self) -> bool:
        return self.error <= TOLERANCE


class Inputs:
    def __init__(self, recorded: dict[str, Any]) -> None:
        self._recorded = recorded

    def __getattr__(self, name: str) -> Tensor:
        return tensor(self._recorded[name])

    def fresh(self, name: str) -> Tensor:
        return tensor(self._recorded[name]).requires_grad_()


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def distance(ours: Tensor | float, theirs: Any, mask: Tensor | None = None) -> float:
    """Element by element; a NaN or inf on one side only is an infinite error."""
    a, b = torch.as_tensor(ours, dtype=torch.float64).detach(), torch.tensor(theirs, dtype=torch.float64)
    if a.shape != b.shape:
        return math.inf
    if mask is not None:
        a, b = a[mask == 1], b[mask == 1]
    if not a.numel():
        return 0.0
    error = ((a - b).abs() / b.abs().clamp_min(1)).nan_to_num(nan=math.inf)
    return float(torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, error).max())


def check_file(path: Path) -> Iterator[Row]:
    """One row per recorded name."""
    recorded = json.loads(path.read_text(encoding="utf-8"))
    x = Inputs(recorded["inputs"])
    for section, check in CHECKS.items():
        for name, answer in recorded.get(section, {}).items():
            try:
                yield Row(f"{path.name} {section} {name}", check(name, answer, x))
            except (KeyError, ValueError, IndexError, TypeError) as error:
                yield Row(f"{path.name} {section} {name}", math.nan, f"{type(error).__name__}: {error}")
    for section in recorded.keys() - CHECKS.keys() - {"source", "inputs"}:
        yield Row(f"{path.name} {section}", math.nan, "unknown section")


def _advantages(name: str, answer: dict[str, Any], x: Inputs) -> float:
    estimator, _, option = name.partition(" ")
    if option not in ("", "norm_by_std=false", "norm_by_std=true"):
        raise KeyError(option)
    episode = Episode(
        token_rewards_NT=x.rewards,
        mask_NT=x.mask,
        group_N=torch.tensor(answer.get("group", x.group.tolist())).long(),
        values_NT=x.values,
        greedy_scores_N=x.greedy_scores,
    )
    settings = Settings(
        gamma=answer["gamma"], lam=answer["lam"], norm_by_std=option != "norm_by_std=false"
    )
    found = advantages.ESTIMATORS[estimator](episode, settings)
    return max(
        distance(found.advantages_NT, answer["advantages"], x.mask),
        distance(found.returns_NT, answer["returns"], x.mask),
    )


def _policy_losses(name: str, answer: dict[str, Any], x: Inputs) -> float:
    loss_name, mode = name.split(" ")
    clip = ClipSettings(
        low=answer["clip_low"],
        high=answer["clip_high"],
        dual=answer["dual_clip"],
        dro_beta=answer["dro_beta"],
    )
    log_probs = x.fresh("log_probs")
    found = policy_losses.LOSSES[loss_name](log_probs, x.old_log_probs, x.advantages, x.mask, clip)
    loss = aggregate(found.loss_NT, x.mask, FIXED_AGGREGATION.get(loss_name, mode))
    loss.backward()
    errors = [distance(loss, answer["loss"]), distance(_grad(log_probs), answer["grad"], x.mask)]
    for metric, value in answer["metrics"].items():
        errors.append(distance(found.metrics[metric] / x.mask.sum(), value))
    return max(errors)


def _kl(name: str, answer: dict[str, Any], x: Inputs) -> float:
    log_probs = x.fresh("log_probs")
    value = kl.ESTIMATORS[name](log_probs, x.ref_log_probs)
    torch.where(x.mask == 1, value, 0.0).sum().backward()
    return max(
        distance(value, answer["value"], x.mask),
        distance(_grad(log_probs), answer["grad_of_masked_sum"], x.mask),
    )


def _other(name: str, answer: Any, x: Inputs) -> float:
    kind, mode = name.split(" ")
    if mode not in AGGREGATIONS:
        raise KeyError(mode)
    if kind == "agg":
        return distance(aggregate(x.values, x.mask, mode), answer)
    if kind != "value_loss":
        raise KeyError(kind)
    values = x.fresh("values")
    loss_NT, clipped = value_loss(values, x.old_values, x.returns, x.mask, answer["cliprange"])
    loss = aggregate(loss_NT, x.mask, mode)
    loss.backward()
    return max(
        distance(loss, answer["loss"]),
        distance(clipped / x.mask.sum(), answer["clipfrac"]),
        distance(_grad(values), answer["grad"], x.mask),
    )


def _grad(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


CHECKS = {"advantages": _advantages, "policy_losses": _policy_losses, "kl": _kl, "other": _other}


def main(paths: list[str]) -> int:
    if not paths:
        print("usage: python tests/golden.py FILE…", file=sys.stderr)
        return 2
    rows: list[Row] = []
    for path in paths:
        try:
            rows += check_file(Path(path))
        except (OSError, ValueError, KeyError) as error:
            rows.append(Row(path, math.nan, f"cannot be read: {error}"))
    bad = [row for row in rows if not row.agrees]
    for row in bad:
        print(f"{row.name}: {row.note or f'largest error {row.error:.3g}'}")
    print(f"{len(rows) - len(bad)} rows agree, {len(bad)} disagree")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
