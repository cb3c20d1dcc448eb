"""Roles → pools, and whether they fit: everything that can be refused before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from miniverl.config import Config, ConfigError, ModelConfig
from miniverl.controller.memory_estimate import Line, Shape, estimate, frozen_lines, learner_lines, total
from miniverl.models.locate import read_config

GIB = 2**30
DECODERS = ("llama", "qwen2", "qwen3", "mistral")
"""Model types whose memory is known from their config alone."""


@dataclass(frozen=True)
class Plan:
    """Where each role lives, and what that will take."""

    config: Config
    device: str
    roles: tuple[str, ...]
    lines: tuple[Line, ...]
    budget: float | None
    """Bytes; None = unknown."""
    obstacles: tuple[str, ...]
    """Why this machine cannot run the plan; empty if it can."""

    @property
    def estimate(self) -> float:
        return total(list(self.lines))

    def table(self) -> str:
        """Placement and memory, as plain text."""
        rows = [
            f"placement={self.config.placement.kind}: {' + '.join(self.roles)} in one "
            f"{'process' if self.config.placement.kind == 'local' else 'Ray host'} on {self.device}"
        ]
        rows += [
            f"  {line.what:22}{line.size / GIB:9.3f} GiB  {_WHEN[line.when]}" for line in self.lines
        ]
        if self.lines:
            fits = "no budget given" if self.budget is None else f"budget {self.budget / GIB:.2f} GiB"
            rows.append(f"  {'total at the worst':22}{self.estimate / GIB:9.3f} GiB  {fits}")
        else:
            rows.append(
                "  no memory estimate: the model's config.json is not on this machine, or not of a known "
                f"family ({', '.join(DECODERS)})"
            )
        rows += [f"would not run here: {obstacle}" for obstacle in self.obstacles]
        return "\n".join(rows)

    def refuse_if_infeasible(self) -> None:
        if self.obstacles:
            raise ConfigError(" ".join(self.obstacles))


_WHEN = {
    "always": "throughout",
    "generate": "while generating",
    "prepare": "before training, alone",
    "score": "while the teacher scores",
    "update": "while updating",
}


def make_plan(config: Config) -> Plan:
    """Raises ConfigError if the plan exceeds `placement.memory_gib`."""
    cuda = torch.cuda.is_available()
    device = config.placement.device
    if device == "auto":
        device = "cuda" if cuda or config.model.requires_cuda else "cpu"
    _check_positions(config)
    obstacles = []
    if device == "cuda" and not cuda:
        obstacles.append(
            "a CUDA GPU is needed (placement.device=cuda or model.requires_cuda=true) and this machine has "
            "none that torch can use. The same recipe runs here on the embedded models with model=demo "
            "placement=local placement.device=auto (or placement=one_gpu)."
        )
    for role, model in config.model.given().items():
        if model.quantization == "nf4" and find_spec("bitsandbytes") is None:
            obstacles.append(
                f"model.{role}.quantization=nf4 needs bitsandbytes: pip install -r requirements/nf4.txt, or "
                f"set model.{role}.quantization=none."
            )
    cores = os.cpu_count() or 1
    if config.placement.kind == "one_gpu" and config.placement.num_cpus > cores:
        asked = config.placement.num_cpus
        obstacles.append(f"placement.num_cpus={asked} is more than this machine's {cores} cores.")
    roles = ("actor", "rollout", *_roles(config))
    lines = tuple(_lines(config, device))
    plan = Plan(config, device, roles, lines, _budget(config, device, cuda), tuple(obstacles))
    if plan.budget is not None and plan.lines and plan.estimate > plan.budget:
        worst = max(plan.lines, key=lambda line: line.size)
        raise ConfigError(
            f"the plan takes {plan.estimate / GIB:.2f} GiB at its worst and the budget is "
            f"{plan.budget / GIB:.2f} GiB (placement.memory_gib). The largest part is {worst.what} "
            f"with {worst.size / GIB:.2f} GiB{_REMEDY.get(worst.what, '')}.\n{plan.table()}"
        )
    return plan


def _roles(config: Config) -> tuple[str, ...]:
    """Who takes part besides actor and rollout. A student with an adapter is its own reference, the adapter
    off."""
    roles = ("teacher",) if config.algo.needs_teacher else ()
    if config.algo.needs_reference and config.model.student.lora is None:
        roles += ("reference",)
    if config.algo.name != "policy_gradient":
        return roles
    if config.algo.policy.advantage == "gae":
        roles += ("critic",)
    return (*roles, "process_reward") if config.algo.policy.advantage == "prime" else roles


def _check_positions(config: Config) -> None:
    """Prompt and response together must fit the positions that each model was made for."""
    response = max(config.rollout.max_response_length, config.eval.max_response_length or 0)
    longest = config.data.max_prompt_length + response
    if config.algo.name == "pretrain":
        _check_row(config)
    for role, model in config.model.given().items():
        found = read_config(model.path)
        positions = (found or {}).get("max_position_embeddings") or (found or {}).get("n_positions")
        if positions is not None and longest > positions:
            raise ConfigError(
                f"data.max_prompt_length={config.data.max_prompt_length} and a response of {response} tokens "
                f"make {longest}, but model.{role} has {positions} positions. Lower data.max_prompt_length, "
                "rollout.max_response_length or eval.max_response_length."
            )


def _check_row(config: Config) -> None:
    found = read_config(config.model.student.path) or {}
    positions = found.get("max_position_embeddings") or found.get("n_positions")
    if positions is not None and config.data.row_tokens > positions:
        raise ConfigError(
            f"data.row_tokens={config.data.row_tokens}: a document may be as long as a row, but "
            f"model.student has {positions} positions. Lower data.row_tokens to that."
        )


_REMEDY = {
    "document mask": ": lower data.row_tokens or trainer.micro_batch_tokens",
    "activations": ": lower trainer.micro_batch_tokens, or set model.student.gradient_checkpointing=true",
    "KV cache": ": lower rollout.max_batch_rows or rollout.max_response_length",
    "logits chunk": ": lower algo.loss_chunk_tokens",
    "reference weights": ": train an adapter (model.student.lora.rank=16), whose base is the reference",
    "teacher weights": ": set model.teacher.quantization=nf4",
    "optimizer": ": train an adapter (model.student.lora.rank=16)",
    "gradients": ": train an adapter (model.student.lora.rank=16)",
}


def _budget(config: Config, device: str, cuda: bool) -> float | None:
    if config.placement.memory_gib is not None:
        return config.placement.memory_gib * GIB
    return float(torch.cuda.get_device_properties(0).total_memory) if device == "cuda" and cuda else None


def _lines(config: Config, device: str) -> list[Line]:
    roles, student = _roles(config), _shape(config.model.student)
    teacher = _shape(config.model.teacher) if config.model.teacher and "teacher" in roles else None
    critic = _shape(config.model.critic or config.model.student)
    if student is None or ("teacher" in roles and teacher is None) or ("critic" in roles and critic is None):
        return []
    lines = estimate(config, student, teacher, device)
    if "reference" in roles:
        lines += frozen_lines("reference", config, config.model.student, student)
    if "critic" in roles and critic is not None:
        lines += learner_lines("critic", config.model.critic or config.model.student, critic)
    if "process_reward" in roles:
        lines += learner_lines("process reward", config.model.student, student)
    return lines


def _shape(model: ModelConfig) -> Shape | None:
    found = read_config(model.path)
    return Shape.of(found) if found and found.get("model_type") in DECODERS else None
