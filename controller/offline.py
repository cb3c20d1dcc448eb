"""The teacher's part of offline distillation: it scores what the cache lacks before anything else loads, and
leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from miniverl.config import Config, ModelConfig
from miniverl.controller.group import WorkerGroup
from miniverl.controller.pool import Pool
from miniverl.data.prompts import PromptStream
from miniverl.data.responses import dataset_rollout
from miniverl.data.target_cache import TargetCache, write
from miniverl.models.digest import model_identity
from miniverl.pack import pack
from miniverl.types import TopKTargets
from miniverl.workers.reference import Reference


def open_targets(
    config: Config,
    teacher: ModelConfig,
    stream: PromptStream,
    pool: Pool,
    vocabulary: int,
    device: str,
    say: Callable[[str], None],
) -> TargetCache:
    """The cache of all that the run will train on, whole. Loads the teacher only if something is missing."""
    wanted = config.trainer.steps * config.trainer.prompts_per_step
    limit = config.rollout.max_response_length
    rollouts = [dataset_rollout(prompt, 0, 0, limit) for prompt in stream.among(wanted)]
    directory = Path(config.algo.cache_dir)
    cache = TargetCache(directory, settings(config, teacher, vocabulary), rollouts)
    missing = cache.missing(say)
    if not missing:
        say(f"teacher targets: all in {directory}; the teacher is not loaded")
        return cache
    absent = sum(len(part.rollouts) for part in missing)
    say(f"teacher targets: scoring {absent} sequences into {directory} …")
    pool.build("teacher", Reference, config, teacher, vocabulary, device)
    group = WorkerGroup(pool, "teacher")
    for part in missing:
        targets = group.shard(Reference.score, pack(part.rollouts)).targets
        if not isinstance(targets, TopKTargets):
            raise TypeError("offline distillation keeps top-k targets only (algo.teacher_top_k)")
        write(part, targets)
    pool.drop("teacher")
    return cache


def settings(config: Config, teacher: ModelConfig, vocabulary: int) -> dict[str, Any]:
    """All besides the sequences that decides what the teacher says."""
    return {
        "teacher": model_identity("teacher", teacher.path),
        "dtype": teacher.dtype,
        "quantization": teacher.quantization,
        "top_k": config.algo.teacher_top_k,
        "temperature": config.rollout.temperature,
        "vocabulary": vocabulary,
    }
