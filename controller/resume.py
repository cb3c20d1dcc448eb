"""Which directory a run writes to and which checkpoint it goes on from (`trainer.run_dir`,
`trainer.resume`)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from miniverl.checkpoint import MANIFEST, Checkpoint, checkpoints, in_use, locked
from miniverl.config import Config, ConfigError
from miniverl.config_io import config_from_dict, config_to_dict, fingerprint

RESULT = "result.json"
MAY_DIFFER = (
    "experiment",
    "summary",
    "hardware",
    "extra",
    "plan_only",
    "algo.cache_dir",
    "placement.kind",
    "placement.memory_gib",
    "placement.num_cpus",
    "placement.wait_s",
    "placement.call_timeout_s",
    "placement.dashboard",
    "eval.every",
    "trainer.run_dir",
    "trainer.resume",
    "trainer.save_every",
    "trainer.keep_last",
    "trainer.keep_best",
    "trainer.export",
    "trainer.sinks",
    "trainer.samples_per_step",
    "trainer.report",
    "trainer.steps",
    "rollout.max_batch_rows",
    "rollout.cuda_graphs",
    "rollout.engine",
    "reward.workers",
)
"""Keys that may change between a checkpoint and the run that goes on from it: none of them alters the
numbers. `trainer.steps` may only with a constant learning rate."""


def choose(config: Config) -> tuple[Path, Checkpoint | None]:
    """The run's directory and the checkpoint to go on from, if any.

    Raises:
        ConfigError: nothing to resume at the path given, a checkpoint of another experiment or a damaged
            one, or a run that is still going.
    """
    trainer = config.trainer
    if trainer.resume == "never":
        return _fresh_directory(config), None
    if trainer.resume == "auto":
        run_dir = Path(trainer.run_dir) if trainer.run_dir else _unfinished_run(config)
        found = checkpoints(run_dir / "checkpoints") if run_dir else []
        if run_dir is None:
            return _fresh_directory(config), None
        if not found:
            return run_dir, None
        with locked(run_dir):  # a run that is still going may be replacing the one we look at
            return run_dir, _compatible(config, found[-1])
    path = Path(trainer.resume)
    found = [_as_checkpoint(path)] if (path / MANIFEST).is_file() else checkpoints(path / "checkpoints")
    if not found:
        raise ConfigError(
            f"trainer.resume={trainer.resume}: there is no whole checkpoint there. Give a run directory, one "
            "of its checkpoints/step_… directories, auto, or never."
        )
    checkpoint = _compatible(config, found[-1])
    holder = checkpoint.path.absolute().parent
    if trainer.run_dir and Path(trainer.run_dir).resolve() != holder.parent.resolve():
        return _fresh_directory(config), checkpoint
    # One that was copied out of its run has no run directory to go on in.
    return holder.parent if holder.name == "checkpoints" else _fresh_directory(config), checkpoint


def check_data(checkpoint: Checkpoint, fingerprint: str) -> None:
    """Raises ConfigError if the data are not those that the checkpoint's position counts in."""
    state = checkpoint.state()
    if state["data"] != fingerprint:
        raise ConfigError(
            f"checkpoint {checkpoint.path}: the training data changed since it was written (rows, order or "
            f"rendering), so its position {state['position']} means nothing now. Restore the data, or start "
            "anew with trainer.resume=never and another trainer.run_dir."
        )


def _fresh_directory(config: Config) -> Path:
    if config.trainer.run_dir:
        directory = Path(config.trainer.run_dir)
        if checkpoints(directory / "checkpoints"):
            raise ConfigError(
                f"trainer.run_dir={directory} holds checkpoints of an earlier run, and trainer.resume=never "
                "would mix with them. Choose another trainer.run_dir, or trainer.resume=auto to go on."
            )
        return directory
    stamp = time.strftime("%Y%m%d-%H%M%S")
    base = Path("runs") / (config.experiment or "run") / stamp
    return next(
        path
        for path in (base, *(base.with_name(f"{stamp}-{i}") for i in range(1, 1000)))
        if not path.exists()
    )


def _unfinished_run(config: Config) -> Path | None:
    """The newest run of the very same config that has a checkpoint, has no result, and that no process is
    writing to."""
    wanted = fingerprint(config)
    for directory in sorted((Path("runs") / (config.experiment or "run")).glob("*"), reverse=True):
        if (directory / RESULT).exists() or in_use(directory) or not checkpoints(directory / "checkpoints"):
            continue
        try:
            then = fingerprint(_config_of(checkpoints(directory / "checkpoints")[-1]))
        except (ConfigError, ValueError, KeyError, OSError):
            continue  # of another version, or damaged: not this run, and no reason to refuse it
        if then == wanted:
            return directory
    return None


def _compatible(config: Config, checkpoint: Checkpoint) -> Checkpoint:
    """Refuse a damaged checkpoint, and to go on under settings that would give other numbers, naming them."""
    checkpoint.verify()
    now, then = _flat(config_to_dict(config)), _flat(config_to_dict(_config_of(checkpoint)))
    differing = [
        f"{key} was {then.get(key)!r} and is {now.get(key)!r}"
        for key in sorted(now.keys() | then.keys())
        if now.get(key) != then.get(key) and not key.startswith(MAY_DIFFER)
    ]
    if now["trainer.steps"] != then["trainer.steps"] and config.optim.schedule != "constant":
        differing.append(
            f"trainer.steps was {then['trainer.steps']} and is {now['trainer.steps']} under "
            f"optim.schedule={config.optim.schedule}"
        )
    if differing:
        raise ConfigError(
            f"{checkpoint.path} belongs to another experiment: {'; '.join(differing[:4])}. Set them back, or "
            "start anew with trainer.resume=never and another trainer.run_dir."
        )
    return checkpoint


def _as_checkpoint(path: Path) -> Checkpoint:
    return Checkpoint(path, json.loads((path / MANIFEST).read_text(encoding="utf-8"))["step"])


def _config_of(checkpoint: Checkpoint) -> Config:
    return config_from_dict(checkpoint.state()["config"])


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
