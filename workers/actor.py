"""The actor role: the student that learns. Holds the model and its optimizer; a step is one global batch.

It is handed batches with their targets and never asks where they come from.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from miniverl.algos.chunked import token_loss
from miniverl.algos.divergences import DIVERGENCES, PARAMETERS
from miniverl.algos.objectives import FullDistillation, NegativeLogLikelihood, Objective, TopKDistillation
from miniverl.config import AlgoConfig, Config
from miniverl.metrics import Mean, Metric, merge
from miniverl.models.digest import module_digest
from miniverl.models.forward import hidden_before_trained, trained_token_ids
from miniverl.models.load import load_model
from miniverl.models.packed import check_packable
from miniverl.pack import micro_batches
from miniverl.types import Batch, Head, HiddenTargets, PolicyTargets, PreferenceTargets, TopKTargets
from miniverl.workers.log_probs import trained_log_probs
from miniverl.workers.optimizer import Optimizer
from miniverl.workers.optimizer_state import os_errors
from miniverl.workers.policy import policy_loss
from miniverl.workers.preference import preference_loss
from miniverl.workers.transfer import storage_identity

LOSS_NAMES = {
    "gkd": "actor/distillation_loss",
    "kd": "actor/distillation_loss",
    "sft": "actor/nll_loss",
    "pretrain": "actor/nll_loss",
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
        self.optimizer = Optimizer(
            "actor", self.trained, config.optim, config.optim.lr, optimizer_steps(config)
        )
        # torch seeds each process differently; whatever in a model draws (dropout) must not depend on it.
        torch.manual_seed(config.trainer.seed)
        self.kl_coef = start_kl_coef(config)
        self.teacher_head: Head | None = None

    def attach_teacher(self, head: Head) -> None:
        """The teacher's output head, which turns HiddenTargets into its distribution."""
        self.teacher_head = head

    def update(self, batch: Batch) -> dict[str, Metric]:
        """One optimizer step on the global batch, in micro-batches; what it learned from, as metrics.

        Raises:
            RunError: too many gradients in a row were not finite; the weights are as before.
        """
        metrics = self.backward(batch)
        return {**metrics, **self.optimizer.step()}

    def set_kl_coef(self, coefficient: float) -> None:
        """The KL's weight from now on (algo.policy.kl_target adapts it); saved with the weights."""
        self.kl_coef = coefficient

    def current_kl_coef(self) -> float:
        return self.kl_coef

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
        parts: list[dict[str, Metric]] = []
        for piece in micro_batches(batch, self.config.trainer.micro_batch_tokens):
            loss, metrics = (
                policy_loss(self.model, piece, self.config, self.kl_coef)
                if isinstance(batch.targets, PolicyTargets)
                else preference_loss(self.model, piece, self.config)
            )
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
        """Trained weights, optimizer, KL coefficient and RNG as safetensors into an existing directory."""
        path = Path(directory)
        self.optimizer.save(path)
        state = {"cpu": torch.get_rng_state(), "kl_coef": torch.tensor([self.kl_coef], dtype=torch.float64)}
        if self.model.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.model.device)
        with os_errors():
            save_file(state, path / "actor.safetensors")

    def load(self, directory: str) -> None:
        """Take up where `save` left off."""
        path = Path(directory)
        self.optimizer.load(path)
        state = load_file(path / "actor.safetensors")
        self.kl_coef = float(state["kl_coef"])
        torch.set_rng_state(state["cpu"])
        if "cuda" in state and self.model.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], self.model.device)

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
    """Of the whole run: a policy gradient takes several per rollout batch, and none while its critic warms
    up."""
    steps = config.trainer.steps
    if config.algo.name == "policy_gradient":
        steps -= config.algo.policy.actor_warmup_steps
    return steps * config.algo.epochs * config.algo.updates_per_epoch


def start_kl_coef(config: Config) -> float:
    policy = config.algo.policy
    return policy.ppo_kl_coef if policy.loss == "ppo_kl" else policy.kl_coef


def _divergence(algo: AlgoConfig) -> partial:
    numbers = {"beta": algo.beta, "alpha": algo.alpha}
    return partial(
        DIVERGENCES[algo.divergence], **{k: numbers[k] for k in PARAMETERS.get(algo.divergence, ())}
    )
