"""A group of workers of one role, spoken to as one: `all`, `shard`, `reduce`.

A call names the unbound method (`actor.shard(Actor.log_probs, batch, temperature=0.7)`), so an editor and a
type checker see misspelt methods and arguments. Where the workers live is the pool's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from miniverl.controller.pool import Pool
from miniverl.metrics import Metric, finalize, merge
from miniverl.pack import balance, shares
from miniverl.types import Batch, HiddenTargets, Prompt, Targets, TopKTargets

P = ParamSpec("P")
W = TypeVar("W")
R = TypeVar("R")
Item = TypeVar("Item")


class WorkerGroup:
    """All workers of `role` in `pool`, one per host."""

    def __init__(self, pool: Pool, role: str) -> None:
        self.pool = pool
        self.role = role

    def all(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """The same call on each worker."""
        return self._call(method, [args] * self.pool.size, kwargs)

    def first(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """A call on one worker, for what all hold alike."""
        handle = self.pool.call(0, self.role, method.__name__, args, kwargs)
        return self.pool.wait([handle], f"{self.role}.{method.__name__}")[0]

    def reduce(
        self,
        method: Callable[[W, Batch], Mapping[str, Metric]],
        batch: Batch,
    ) -> dict[str, float]:
        """Shard the batch by tokens; merge the workers' metrics with their own denominators."""
        return self.reduce_each(method, [batch])

    def reduce_each(
        self,
        method: Callable[[W, Batch], Mapping[str, Metric]],
        batches: Sequence[Batch],
        until: Callable[[Mapping[str, float]], bool] | None = None,
    ) -> dict[str, float]:
        """`reduce` of one batch after the other, their metrics merged as if they were one. Ends early after a
        batch whose own metrics `until` is true of."""
        parts: list[Mapping[str, Metric]] = []
        for batch in batches:
            pieces = [batch.select(share) for share in shares(batch, self.pool.size)]
            answers = self._call(method, [(piece,) for piece in pieces], {})
            parts += answers
            if until is not None and until(finalize(merge(answers))):
                break
        return finalize(merge(parts))

    def rows(
        self,
        method: Callable[Concatenate[W, Batch, P], list[Item]],
        batch: Batch,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[Item]:
        """Shard the batch by tokens; one answer per sequence, in the batch's order."""
        places = shares(batch, self.pool.size)
        parts = self._call(method, [(batch.select(share), *args) for share in places], kwargs)
        answers = dict(
            zip((i for share in places for i in share), (a for part in parts for a in part), strict=True)
        )
        return [answers[i] for i in range(len(batch))]

    def shard(
        self,
        method: Callable[Concatenate[W, Batch, P], Batch],
        batch: Batch,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Batch:
        """Shard the batch by tokens and put the workers' batches back into its order."""
        pieces = [batch.select(share) for share in shares(batch, self.pool.size)]
        parts = self._call(method, [(piece, *args) for piece in pieces], kwargs)
        return _joined(parts, batch.rows)

    def map(
        self,
        method: Callable[Concatenate[W, Sequence[Prompt], P], list[Item]],
        prompts: Sequence[Prompt],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[Item]:
        """One answer per prompt, in the prompts' order, whichever worker gave it."""
        # No worker is called for nothing where there are fewer items than workers.
        places = [share for share in balance([len(p.token_ids) for p in prompts], self.pool.size) if share]
        parts = self._call(method, [([prompts[i] for i in share], *args) for share in places], kwargs)
        answers = dict(
            zip((i for share in places for i in share), (a for part in parts for a in part), strict=True)
        )
        return [answers[i] for i in range(len(prompts))]

    def _call(
        self, method: Callable[..., R], args_per_host: Sequence[tuple[Any, ...]], kwargs: Mapping[str, Any]
    ) -> list[R]:
        handles = [
            self.pool.call(host, self.role, method.__name__, args, kwargs)
            for host, args in enumerate(args_per_host)
        ]
        return self.pool.wait(handles, f"{self.role}.{method.__name__}")


def _joined(parts: Sequence[Batch], rows: Sequence[int]) -> Batch:
    """Shards laid end to end, in the order of `rows`."""
    if len(parts) == 1 and parts[0].rows == tuple(rows):
        return parts[0]
    whole = Batch(
        token_ids_S=torch.cat([p.token_ids_S for p in parts]),
        lengths_N=torch.cat([p.lengths_N for p in parts]),
        mask_S=torch.cat([p.mask_S for p in parts]),
        rows=tuple(row for p in parts for row in p.rows),
        trained_tokens=parts[0].trained_tokens,
        trained_sequences=parts[0].trained_sequences,
        targets=_joined_targets([p.targets for p in parts if p.targets is not None]),
        units=tuple(unit for p in parts for unit in p.units or ()) or None,
    )
    place = {row: i for i, row in enumerate(whole.rows)}
    return whole.select([place[row] for row in rows])


def _joined_targets(parts: Sequence[Targets]) -> Targets | None:
    if not parts:
        return None
    if all(isinstance(p, HiddenTargets) for p in parts):
        return HiddenTargets(torch.cat([p.hidden_MH for p in parts if isinstance(p, HiddenTargets)]))
    top = [p for p in parts if isinstance(p, TopKTargets)]
    return TopKTargets(torch.cat([p.ids_MK for p in top]), torch.cat([p.log_probs_MK for p in top]))
