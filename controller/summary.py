"""Numbers about a step's rollouts, under verl's names."""

from __future__ import annotations

from collections.abc import Sequence

from miniverl.metrics import Mean, Metric, Min, Sum, finalize, length_metrics
from miniverl.types import Rollout
from miniverl.workers.rollout.base import Sampling


def describe_rollouts(rollouts: Sequence[Rollout], sampling: Sampling) -> dict[str, float]:
    """Lengths, mean score, tokens, share of dataset responses, and the oldest weight version that wrote a
    token."""
    # The dataset's answers are not the student's merit.
    own = [r for r in rollouts if r.source == "student"] or rollouts
    metrics: dict[str, Metric] = {
        **length_metrics("response_length", [len(r.response_ids) for r in own], sampling.max_new_tokens),
        **length_metrics("prompt_length", [len(r.prompt_ids) for r in rollouts], 2**31),
        "critic/score/mean": Mean.of(r.reward for r in own if r.reward is not None),
        "rollout/dataset_share": Mean.of(r.source == "dataset" for r in rollouts),
        "perf/total_num_tokens": Sum(sum(len(r) for r in rollouts)),
        "training/weight_version": Min(min(r.version[0] for r in rollouts)),
    }
    return finalize({name: metric for name, metric in metrics.items() if name != "prompt_length/clip_ratio"})
