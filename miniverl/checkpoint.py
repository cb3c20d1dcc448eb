"""Checkpoints as directories that are either whole or not there: written aside, checksummed, then renamed.

`manifest.json` is written last and names every file with its SHA-256, so a directory that carries one is
complete. What goes into a checkpoint is its writers' business.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from miniverl.config import ConfigError, RunError

MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int

    def state(self) -> dict[str, Any]:
        return json.loads((self.path / STATE).read_text(encoding="utf-8"))

    def verify(self) -> Self:
        """Recompute every checksum.

        Raises:
            RunError: a file is missing or differs, named.
        """
        try:
            files: dict[str, str] = json.loads((self.path / MANIFEST).read_bytes())["files"]
        except (ValueError, KeyError):
            raise self._damaged(f"{MANIFEST} cannot be read") from None
        for name, expected in files.items():
            file = self.path / name
            if not file.is_file():
                raise self._damaged(f"{name} is missing")
            if _sha256(file) != expected:
                raise self._damaged(f"{name} does not match its checksum")
        return self

    def _damaged(self, what: str) -> ConfigError:
        return ConfigError(
            f"checkpoint {self.path}: {what}. Resume from another one with trainer.resume=PATH, or start "
            "anew with trainer.resume=never and another trainer.run_dir."
        )


def write_checkpoint(
    directory: Path, step: int, state: dict[str, Any], writers: list[Callable[[str], None]]
) -> Checkpoint:
    """Write `directory/step_<step>`: each writer gets the path of the unfinished directory and fills it.

    An interruption at any point leaves an unfinished directory that no reader takes for a checkpoint. If the
    disk is full, what was written is removed again and the earlier checkpoints stay.

    Raises:
        RunError: the files could not be written.
    """
    final, unfinished = directory / f"step_{step:06d}", directory / f".unfinished_{step:06d}"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        for write in writers:
            write(str(unfinished))
        _write(unfinished / STATE, json.dumps(state, indent=1, allow_nan=False))
        files = {
            str(f.relative_to(unfinished)): _sha256(f) for f in sorted(unfinished.rglob("*")) if f.is_file()
        }
        for name in files:
            _sync_to_disk(unfinished / name)
        _write(unfinished / MANIFEST, json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1))
        _sync_to_disk(unfinished)
        if final.exists():  # the same step again after a resume from an earlier one
            _remove(final)
        unfinished.rename(final)
        _sync_to_disk(directory)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise RunError(
            f"the checkpoint of step {step} could not be written to {directory}: {error.strerror or error}. "
            "Earlier checkpoints are intact; free some space and start again to go on from them."
        ) from error
    return Checkpoint(final, step)


def checkpoints(directory: Path) -> list[Checkpoint]:
    """The whole checkpoints in a directory, oldest first. Unfinished ones are not among them."""
    found = [
        Checkpoint(path, int(path.name.removeprefix("step_")))
        for path in directory.glob("step_*")
        if (path / MANIFEST).is_file()
    ]
    return sorted(found, key=lambda c: c.step)


def prune(directory: Path, newest: int, keep_last: int, scores: Mapping[int, float]) -> None:
    """Remove all but the last `keep_last` checkpoints up to step `newest`, and, of those with a score (by
    step), the best.

    Those after `newest` were left behind by going on from an earlier one. Leftovers of interrupted writes go
    too.
    """
    for unfinished in directory.glob(".unfinished_*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    found = checkpoints(directory)
    valid = [checkpoint.step for checkpoint in found if checkpoint.step <= newest]
    best = max((step for step in valid if step in scores), key=scores.__getitem__, default=None)
    for checkpoint in found:
        if checkpoint.step not in (*valid[-keep_last:], best):
            _remove(checkpoint.path)


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the run directory against a second run. The kernel lets go when the process dies, however it dies.

    Raises:
        ConfigError: another process holds it, or it cannot be written to.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = open(run_dir / ".lock", "a+", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise ConfigError(
            f"trainer.run_dir={run_dir} cannot be written to: {error.strerror}. Choose another one."
        ) from None
    with file as lock:
        if not _try_lock(lock.fileno()):
            lock.seek(0)
            raise ConfigError(
                f"trainer.run_dir={run_dir}: another run (process {lock.read().strip() or 'unknown'}) is "
                "writing there. Wait for it, or choose another trainer.run_dir."
            )
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def in_use(run_dir: Path) -> bool:
    """Whether a living process holds the run directory."""
    path = run_dir / ".lock"
    if not path.exists():
        return False
    with open(path, encoding="utf-8") as lock:
        return not _try_lock(lock.fileno())


def write_json(path: Path, value: object) -> None:
    """Atomically: a reader sees the old file or the new one."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    _write(unfinished, json.dumps(value, indent=1, ensure_ascii=False))
    unfinished.replace(path)


def _remove(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink(missing_ok=True)  # without it, a half-removed directory is no checkpoint
    shutil.rmtree(checkpoint)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
