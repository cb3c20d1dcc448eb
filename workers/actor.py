"""The actor role: the student that learns. Holds the model and its optimizer; a step is one global batch.

It is handed batches with their targets and never asks where they come from.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from miniverl.algos.chunked import token_loss
from miniverl.algos.divergences import DIVERGENCES, PARAMETERS
from miniverl.algos.objectives import FullDistillation, NegativeLogLikelihood, Objective, TopKDistillation
from miniverl.config import AlgoConfig, Config, OptimConfig, RunError
from miniverl.metrics import Max, Mean, Metric, merge
from miniverl.models.digest import module_digest
from miniverl.models.forward import hidden_before_trained, trained_token_ids
from miniverl.models.load import load_model
from miniverl.models.packed import check_packable
from miniverl.pack import micro_batches
from miniverl.types import Batch, Head, HiddenTargets, PolicyTargets, PreferenceTargets, TopKTargets
from miniverl.workers.log_probs import trained_log_probs
from miniverl.workers.optimizer_state import load_optimizer, os_errors, save_optimizer
from miniverl.workers.policy import policy_loss
from miniverl.workers.preference import preference_loss
from miniverl.workers.transfer import storage_identity

LOSS_NAMES = {
    "gkd": "actor/distillation_loss",
    "kd": "actor/distillation_loss",
    "sft": "actor/nll_loss",
    "pretrain": "actor/nll_loss",
    "policy_gradient": "actor/pg_loss",
}


class Actor:
    def __init__(self, config: Config, vocab_size: int, device: str) -> None:
        self.config = config
        self.model = load_model(
            "student",
            config.model.student,
            vocab_size=vocab_size,
            device=torch.device(device),
            seed=config.trainer.seed,
        )
        if config.algo.name == "pretrain":
            check_packable("student", config.model.student.path, self.model, config.data.row_tokens)
        self.trained = {name: p for name, p in self.model.causal_lm.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(
            self.trained.values(),
            lr=config.optim.lr,
            betas=config.optim.betas,
            weight_decay=config.optim.weight_decay,
            fused=True,
        )
        # torch seeds each process differently; whatever in a model draws (dropout) must not depend on it.
        torch.manual_seed(config.trainer.seed)
        self.step = 0
        self.teacher_head: Head | None = None

    def attach_teacher(self, head: Head) -> None:
        """The teacher's output head, which turns HiddenTargets into its distribution."""
        self.teacher_head = head

    def update(self, batch: Batch) -> dict[str, Metric]:
        """One optimizer step on the global batch, in micro-batches.

        Raises:
            RunError: the gradient is not finite; the weights are as before.
        """
        lr = self.config.optim.lr * lr_factor(self.step, self.config.optim, optimizer_steps(self.config))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        metrics = self.backward(batch)
        norm = float(
            torch.nn.utils.clip_grad_norm_(self.trained.values(), self.config.optim.grad_clip or math.inf)
        )
        if not math.isfinite(norm):
            self.optimizer.zero_grad()
            raise RunError(
                f"step {self.step + 1}: the gradient's norm is {norm}. The weights were not changed; the "
                "last checkpoint is good. A smaller optim.lr, or dtype=float32, usually helps."
            )
        self.optimizer.step()
        # The fused kernel writes without counting, and `identity` counts.
        torch.autograd.graph.increment_version(self.trained.values())
        self.optimizer.zero_grad()
        self.step += 1
        return {**metrics, "actor/grad_norm": Max(norm), "actor/lr": Max(lr)}

    def backward(self, batch: Batch) -> dict[str, Metric]:
        """Gradients of the batch's loss into `.grad`; the loss and its parts as metrics."""
        self.model.causal_lm.train()
        if isinstance(batch.targets, PolicyTargets | PreferenceTargets):
            metrics = self._sequence_backward(batch)
            self.model.causal_lm.eval()
            return metrics
        sums: dict[str, float] = {}
        for piece in micro_batches(batch, self.config.trainer.micro_batch_tokens):
            result = token_loss(
                hidden_before_trained(self.model.backbone, piece),
                self.model.head,
                self._objective(piece),
                temperature=self._temperature,
                denominator=batch.trained_tokens,
                chunk_tokens=self.config.algo.loss_chunk_tokens,
            )
            result.loss.backward()
            for name, value in {LOSS_NAMES[self.config.algo.name]: result.total, **result.sums}.items():
                sums[name] = sums.get(name, 0.0) + value
        self.model.causal_lm.eval()
        tokens = int(batch.mask_S.sum())
        return {name: Mean(value, tokens) for name, value in sums.items()}

    def _sequence_backward(self, batch: Batch) -> dict[str, Metric]:
        """The same for a policy-gradient or preference loss, which may hang on whole sequences."""
        loss_of = policy_loss if isinstance(batch.targets, PolicyTargets) else preference_loss
        parts: list[dict[str, Metric]] = []
        for piece in micro_batches(batch, self.config.trainer.micro_batch_tokens):
            loss, metrics = loss_of(self.model, piece, self.config)
            loss.backward()
            parts.append(metrics)
        return merge(parts)

    def reference_log_probs(self, batch: Batch, temperature: float) -> list[Tensor]:
        """`log_probs` of the model that the adapter sits on: a reference without a second copy."""
        adapter = self.model.adapter
        if adapter is None:
            raise ValueError("only a student with an adapter holds its own reference")
        with adapter.disable_adapter():
            return self.log_probs(batch, temperature)

    def log_probs(self, batch: Batch, temperature: float) -> list[Tensor]:
        """log q of each sequence's trained tokens at `temperature`, one tensor per sequence in the batch's
        order."""
        return trained_log_probs(self.model, batch, self.config, temperature)

    def identity(self) -> str:
        """Where the weights lie and how often they were written: what a shared engine must read."""
        return storage_identity(self.model.causal_lm)

    def digest(self) -> str:
        """SHA-256 of what is trained."""
        return module_digest(self.model.causal_lm, trainable_only=True)

    def save(self, directory: str) -> None:
        """Trained weights, optimizer, step and RNG as safetensors into an existing directory."""
        path = Path(directory)
        with os_errors():
            save_file(
                {name: p.detach().cpu().contiguous() for name, p in self.trained.items()},
                path / "weights.safetensors",
            )
        save_optimizer(self.optimizer, self.trained, path / "optimizer.safetensors")
        rng = {"cpu": torch.get_rng_state(), "step": torch.tensor([self.step])}
        if self.model.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self.model.device)
        with os_errors():
            save_file(rng, path / "rng.safetensors")

    def load(self, directory: str) -> None:
        """Take up where `save` left off."""
        path = Path(directory)
        with torch.no_grad():
            for name, saved in load_file(path / "weights.safetensors").items():
                self.trained[name].copy_(saved)
        load_optimizer(self.optimizer, self.trained, path / "optimizer.safetensors")
        rng = load_file(path / "rng.safetensors")
        self.step = int(rng["step"])
        torch.set_rng_state(rng["cpu"])
        if "cuda" in rng and self.model.device.type == "cuda":
            torch.cuda.set_rng_state(rng["cuda"], self.model.device)

    def export(self, directory: str) -> None:
        """A directory that plain transformers (or, with LoRA, peft) loads."""
        with os_errors():
            (self.model.adapter or self.model.causal_lm).save_pretrained(directory)

    @property
    def _temperature(self) -> float:
        return self.config.rollout.temperature if self.config.algo.tempered else 1.0

    def _objective(self, batch: Batch) -> Objective:
        if self.config.algo.name in ("sft", "pretrain"):
            return NegativeLogLikelihood(trained_token_ids(batch))
        divergence = _divergence(self.config.algo)
        if isinstance(batch.targets, TopKTargets):
            return TopKDistillation(divergence, batch.targets)
        if not isinstance(batch.targets, HiddenTargets) or self.teacher_head is None:
            raise ValueError("distillation needs the teacher's targets and head; the batch carries none")
        return FullDistillation(divergence, batch.targets, self.teacher_head, self._temperature)


def optimizer_steps(config: Config) -> int:
    """Of the whole run: a policy gradient takes several per rollout batch."""
    return config.trainer.steps * config.algo.epochs * config.algo.updates_per_epoch


def lr_factor(step: int, optim: OptimConfig, total_steps: int) -> float:
    """Share of optim.lr at the 0-based `step`: linear warm-up (first step 1/warmup), then the schedule to
    its floor."""
    if step < optim.warmup_steps:
        return (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return 1.0
    progress = (step - optim.warmup_steps) / max(1, total_steps - 1 - optim.warmup_steps)
    fall = 1 - progress if optim.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * max(0.0, fall)


def _divergence(algo: AlgoConfig) -> partial:
    numbers = {"beta": algo.beta, "alpha": algo.alpha}
    return partial(
        DIVERGENCES[algo.divergence], **{k: numbers[k] for k in PARAMETERS.get(algo.divergence, ())}
    )
