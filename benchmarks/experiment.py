"""The GKD step that several benchmarks take: the tiny pair through the framework's own page.

8 prompts × 4 samples × 64 new tokens, generalised JSD with β = .5, learning rate 1e-3, end-of-text ignored.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from benchmarks.measure import OUT
from benchmarks.models import tiny_student, tiny_teacher
from miniverl.config import (
    AlgoConfig,
    Config,
    DataConfig,
    EvalConfig,
    ModelConfig,
    ModelsConfig,
    OptimConfig,
    PlacementConfig,
    RolloutConfig,
    TrainerConfig,
)
from miniverl.controller.build import assemble
from miniverl.controller.plan import make_plan
from miniverl.controller.pool import Pool
from miniverl.controller.record import Record
from miniverl.controller.scoring import open_rewards
from miniverl.controller.trainer import Loop
from miniverl.data.prompts import open_data
from miniverl.metrics import Timers
from miniverl.models.load import load_tokenizer

PROMPTS, SAMPLES, NEW_TOKENS = 8, 4, 64
ROWS = PROMPTS * SAMPLES
BETA, LR = 0.5, 1e-3
PROMPT_ROWS = 256


class KeptTimers(Timers):
    """Timers whose last step can still be read after it was logged; with `time.process_time`, CPU-seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(clock)
        self.last: dict[str, float] = {}

    def pop(self) -> dict[str, float]:
        self.last = super().pop()
        return self.last


def prompt_file() -> tuple[Path, int]:
    """JSON lines with a `prompt` each, and their length in tokens: all alike, so that batches are, too."""
    tokenizer = load_tokenizer("student", ModelConfig(path=str(tiny_student().path)))
    numbers = random.Random(0)
    by_length: dict[int, list[str]] = {}
    while True:
        text = f"What is {numbers.randint(10, 99)} plus {numbers.randint(10, 99)}? Answer with digits."
        messages = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        lines = by_length.setdefault(len(ids), [])
        lines.append(json.dumps({"prompt": messages}))
        if len(lines) == PROMPT_ROWS:
            path = OUT / "gkd_prompts.jsonl"
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
            return path, len(ids)


def gkd_config(
    kind: Literal["local", "one_gpu"], sinks: tuple[Literal["jsonl", "tensorboard"], ...]
) -> Config:
    prompts, length = prompt_file()
    return Config(
        experiment="bench_gkd",
        model=ModelsConfig(
            student=ModelConfig(path=str(tiny_student().path)),
            teacher=ModelConfig(path=str(tiny_teacher().path)),
        ),
        data=DataConfig(source="files", train_files=(str(prompts),), max_prompt_length=length),
        rollout=RolloutConfig(n=SAMPLES, max_response_length=NEW_TOKENS, ignore_eos=True),
        algo=AlgoConfig(name="gkd", divergence="jsd", beta=BETA),
        optim=OptimConfig(lr=LR),
        eval=EvalConfig(every=0),
        trainer=TrainerConfig(
            prompts_per_step=PROMPTS,
            run_dir=str(OUT / "runs" / kind),
            resume="never",
            sinks=sinks,
            samples_per_step=8 if sinks else 0,
            save_every=0,
            export=False,
            report=False,
        ),
        placement=PlacementConfig(kind=kind, device="cpu"),
    )


def open_loop(config: Config, pool: Pool) -> Loop:
    """The page over this pool, as `miniverl.controller.build.run` sets it up, ready to `step`. The processes
    that score end with the benchmark."""
    tokenizer = load_tokenizer("student", config.model.student)
    plan = make_plan(config)
    run_dir = Path(str(config.trainer.run_dir))
    run_dir.mkdir(parents=True, exist_ok=True)
    data = open_data(config, tokenizer, None)
    record = Record(config, run_dir, None, time.time())
    opened = contextlib.ExitStack()
    atexit.register(opened.close)
    rewards = opened.enter_context(open_rewards(config, tokenizer, run_dir))
    return assemble(config, plan.roles, pool, tokenizer, (), data, record, plan.device, rewards)
