"""TRL's GKDTrainer, one step each time a line arrives on standard input. Runs in TRL's own environment.

It imports nothing of miniverl. Prints `READY`, then one `STEP {json}` per step with its CPU-seconds, and
those of generation and teacher among them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]  # of the other environment
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.experimental.gkd import GKDConfig, GKDTrainer  # pyright: ignore[reportMissingImports]


class Watch(TrainerCallback):
    """Waits for the word to go, and tells what the step took."""

    def __init__(self, student: Any, teacher: Any) -> None:
        self.generation = self.teacher = 0.0
        self.tokens: dict[str, int] = {}
        self._generate = student.generate
        student.generate = self._timed_generate
        teacher.register_forward_pre_hook(self._before_teacher)
        teacher.register_forward_hook(self._after_teacher)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not sys.stdin.readline():
            sys.exit(0)
        self.generation = self.teacher = 0.0
        self.started = time.process_time(), time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        cpu, wall = time.process_time() - self.started[0], time.perf_counter() - self.started[1]
        parts = {"cpu": cpu, "wall": wall, "generation": self.generation, "teacher": self.teacher}
        print("STEP " + json.dumps({**parts, **self.tokens}), flush=True)

    def _timed_generate(self, *args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        out = self._generate(*args, **kwargs)
        self.generation += time.process_time() - start
        prompts, mask = kwargs["input_ids"], kwargs["attention_mask"]
        new = out.sequences[:, prompts.shape[1] :]
        self.tokens = {"prompt_tokens": int(mask.sum()), "new_tokens": new.numel()}
        return out

    def _before_teacher(self, *args: Any) -> None:
        self._teacher_started = time.process_time()

    def _after_teacher(self, *args: Any) -> None:
        self.teacher += time.process_time() - self._teacher_started


def load(path: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    # Every response has its full length, on both sides of the comparison.
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    return model


def read_rows(path: str, samples: int) -> list[dict[str, Any]]:
    """Each prompt `samples` times, with the answer that the trainer wants to see and does not use."""
    with open(path, encoding="utf-8") as lines:
        prompts = [json.loads(line)["prompt"] for line in lines]
    answer = {"role": "assistant", "content": "The answer is 42."}
    return [{"messages": [*prompt, answer]} for prompt in prompts for _ in range(samples)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--student", required=True)
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--prompts", required=True, help="JSON lines with a `prompt`, a list of messages")
    parser.add_argument("--rows", type=int, required=True, help="sequences a step")
    parser.add_argument("--samples", type=int, required=True, help="of each prompt")
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--beta", type=float, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument(
        "--no-checkpointing", action="store_true", help="TRL's default recomputes activations"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(args.student, padding_side="left")
    student, teacher = load(args.student), load(args.teacher)
    rows = read_rows(args.prompts, args.samples)
    settings: dict[str, Any] = {"gradient_checkpointing": False} if args.no_checkpointing else {}
    config = GKDConfig(
        output_dir=args.out,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=args.rows,
        max_steps=args.steps,
        learning_rate=args.lr,
        lmbda=1.0,
        beta=args.beta,
        temperature=1.0,
        max_new_tokens=args.new_tokens,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=1,
        **settings,
    )
    trainer = GKDTrainer(
        model=student,
        teacher_model=teacher,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Watch(student, teacher)],
    )
    print("READY", flush=True)
    trainer.train()


if __name__ == "__main__":
    main()
