"""A teacher's top-k targets of dataset responses, on disk: scored once, read by every run that asks the same.

A file holds the targets of up to PART sequences and is named by the digest of all they depend on, so a
changed teacher, setting or row is another file, and nothing stale can be read. It is written aside and
renamed, and its checksum is verified when a run opens it. Who scores is `miniverl.controller.offline`'s
business.

Shape legend: M trained tokens · K top-k
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from miniverl.errors import RunError
from miniverl.types import Rollout, TopKTargets

PART = 256
"""Sequences per file: what an interrupted scoring loses at most."""
FORMAT = "miniverl-teacher-targets/1"


@dataclass(frozen=True, slots=True)
class Part:
    path: Path
    rollouts: tuple[Rollout, ...]


class Damaged(Exception):
    """A file of the cache that cannot be trusted; the text says why."""


class TargetCache:
    """Targets of `rollouts` under `directory`.

    settings: all besides the sequences that the targets depend on (teacher, k, temperature, …).
    """

    def __init__(
        self, directory: Path, settings: Mapping[str, object], rollouts: Sequence[Rollout]
    ) -> None:
        distinct = list({sequence_digest(r): r for r in rollouts}.items())
        self.parts: list[Part] = []
        self._place: dict[str, tuple[Path, int, int]] = {}
        for at in range(0, len(distinct), PART):
            items = distinct[at : at + PART]
            identity = json.dumps([FORMAT, settings, [key for key, _ in items]], sort_keys=True)
            path = directory / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.safetensors"
            self.parts.append(Part(path, tuple(rollout for _, rollout in items)))
            start = 0
            for key, rollout in items:
                stop = start + int(rollout.mask.sum())
                self._place[key] = (path, start, stop)
                start = stop

    def missing(self, say: Callable[[str], None]) -> list[Part]:
        """Parts that have no file, or, which `say` is told, a damaged one. Reads every file whole."""
        found = []
        for part in self.parts:
            try:
                verify(part)
            except FileNotFoundError:
                found.append(part)
            except Damaged as damage:
                say(f"{part.path} is damaged ({damage}); its {len(part.rollouts)} sequences are scored anew")
                found.append(part)
        return found

    def targets(self, rollouts: Sequence[Rollout]) -> TopKTargets:
        """The rollouts' targets end to end, in their order.

        Raises:
            RunError: a file is gone or cannot be read any more.
            KeyError: a rollout that the cache was not opened for.
        """
        ids: list[Tensor] = []
        log_probs: list[Tensor] = []
        for rollout in rollouts:
            path, start, stop = self._place[sequence_digest(rollout)]
            try:
                with safe_open(path, framework="pt") as file:
                    ids.append(file.get_slice("ids_MK")[start:stop])
                    log_probs.append(file.get_slice("log_probs_MK")[start:stop])
            except (OSError, SafetensorError) as error:
                raise RunError(
                    f"the teacher targets in {path} cannot be read any more ({error}). The last checkpoint "
                    "is good; starting again scores what is missing."
                ) from error
        return TopKTargets(torch.cat(ids).long(), torch.cat(log_probs))


def sequence_digest(rollout: Rollout) -> str:
    """SHA-256 of what a teacher's targets depend on: prompt ids, response ids, and which are trained."""
    parts = (rollout.prompt_ids.tolist(), rollout.response_ids.tolist(), rollout.mask.tolist())
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def write(part: Part, targets: TopKTargets) -> None:
    """Make the part's file, whole or not at all.

    Raises ValueError if the targets are not one row per trained token of the part.
    """
    tensors = {
        "ids_MK": targets.ids_MK.to(torch.int32).contiguous(),
        "log_probs_MK": targets.log_probs_MK.contiguous(),
    }
    trained = sum(int(r.mask.sum()) for r in part.rollouts)
    if any(len(tensor) != trained for tensor in tensors.values()):
        raise ValueError(f"{len(targets.ids_MK)} rows of targets for {trained} trained tokens")
    part.path.parent.mkdir(parents=True, exist_ok=True)
    aside = part.path.with_name(f".{part.path.stem}.{os.getpid()}.unfinished")
    try:
        save_file(tensors, aside, {"format": FORMAT, "key": part.path.stem, "sha256": _checksum(tensors)})
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(part.path)
    except SafetensorError as error:  # how safetensors tells of a full disk
        raise OSError(f"{part.path} could not be written: {error}") from error
    finally:
        aside.unlink(missing_ok=True)


def verify(part: Part) -> None:
    """Raises FileNotFoundError, or Damaged for a file that is not what `write` made of this part."""
    trained = sum(int(r.mask.sum()) for r in part.rollouts)
    try:
        with safe_open(part.path, framework="pt") as file:
            facts = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in ("ids_MK", "log_probs_MK")}
    except FileNotFoundError:
        raise
    except (OSError, SafetensorError) as error:
        raise Damaged(str(error)) from error
    if facts.get("key") != part.path.stem:
        raise Damaged(f"it was written as {facts.get('key')}")
    if facts.get("sha256") != _checksum(tensors):
        raise Damaged("it does not match its checksum")
    if len(tensors["ids_MK"]) != trained:
        raise Damaged(f"it has {len(tensors['ids_MK'])} rows for {trained} trained tokens")


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        total.update(tensor.numpy().tobytes())
    return total.hexdigest()
