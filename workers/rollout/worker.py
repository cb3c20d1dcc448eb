"""The rollout role: prompts in, rollouts out, through whichever engine the config names.

It decides per sample who writes the response (λ of GKD) and stamps the weight version; how tokens are drawn
is the engine's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miniverl.config import Config, ConfigError
from miniverl.data.responses import dataset_rollout
from miniverl.types import Prompt, Rollout
from miniverl.workers.actor import Actor
from miniverl.workers.rollout.base import Completion, Engine, Request, Sampling
from miniverl.workers.rollout.hf_cached import HfCached
from miniverl.workers.rollout.hf_reference import HfReference
from miniverl.workers.rollout.sampling import uniforms
from miniverl.workers.transfer import SharedModule


class RolloutWorker:
    def __init__(self, config: Config, actor: Actor) -> None:
        self.weights = SharedModule(actor.model)
        self.engine = ENGINES[config.rollout.engine](config, self.weights)
        if config.trainer.deterministic and not self.engine.seeded:
            raise ConfigError(
                f"rollout.engine={config.rollout.engine} cannot be seeded per sample; use rollout=hf_cached, "
                "or accept it with trainer.deterministic=false."
            )

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, n: int, lam: float
    ) -> list[list[Rollout]]:
        """`n` rollouts per prompt, in the prompts' order. A sample's response is the student's with
        probability `lam`, else the dataset's; the draw is a function of (seed, prompt uid, sample index)."""
        own = [self._own_samples(prompt, sampling.seed, n, lam) for prompt in prompts]
        requests = [Request(p.uid, p.token_ids, samples) for p, samples in zip(prompts, own, strict=True)]
        answers = iter(self.engine.generate([r for r in requests if r.samples], sampling))
        groups = []
        for prompt, samples in zip(prompts, own, strict=True):
            written = dict(zip(samples, next(answers), strict=True)) if samples else {}
            groups.append(
                [self._rollout(prompt, k, written.get(k), sampling.max_new_tokens) for k in range(n)]
            )
        return groups

    def sync(self, version: int) -> str:
        """Take the actor's weights as `version`; returns the identity of what the engine now reads."""
        return self.weights.receive(version)

    def notes(self) -> tuple[str, ...]:
        return self.engine.notes

    def _own_samples(self, prompt: Prompt, seed: int, n: int, lam: float) -> tuple[int, ...]:
        if lam == 1.0:
            return tuple(range(n))
        coins_N1 = uniforms(seed, [(f"{prompt.uid}/lambda", k) for k in range(n)], 1)
        return tuple(k for k in range(n) if coins_N1[k, 0] < lam)

    def _rollout(self, prompt: Prompt, sample: int, written: Completion | None, budget: int) -> Rollout:
        version = self.weights.version
        if written is None:
            return dataset_rollout(prompt, sample, version, budget)
        return Rollout(
            uid=prompt.uid,
            sample=sample,
            prompt_ids=np.asarray(prompt.token_ids, np.int32),
            response_ids=np.asarray(written.token_ids, np.int32),
            mask=np.ones(len(written.token_ids), np.int8),
            log_probs=np.asarray(written.log_probs, np.float32),
            version=(version, version),
            finish=written.finish,
        )


ENGINES = {
    "hf_cached": lambda config, weights: _as_engine(
        HfCached(weights.model, config.rollout.max_batch_rows, config.rollout.cuda_graphs == "auto")
    ),
    "hf_reference": lambda config, weights: _as_engine(
        HfReference(weights.model, config.rollout.max_batch_rows)
    ),
}


def _as_engine(engine: Engine) -> Engine:
    """Types only: every entry of ENGINES answers to the protocol."""
    return engine
