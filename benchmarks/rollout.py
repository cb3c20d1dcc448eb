"""Decoding speed: hf_cached, hf_reference, transformers.generate and the bare limit, on the same weights.

Batch 16, 128 new tokens, prompts of about 64 tokens of real text, end-of-text ignored, temperature 1. The
contenders take turns, repetition by repetition. `python -m benchmarks.rollout [--rounds 3]`.
"""

from __future__ import annotations

import argparse
import ast
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from benchmarks.bare import Bare
from benchmarks.measure import Outcome, Spent, Target, clock, median, one_thread
from benchmarks.models import Made, smollm2, tiny_student
from miniverl.config import ModelConfig
from miniverl.models.load import LoadedModel, load_model, load_tokenizer
from miniverl.workers.rollout.base import Completion, Request, Sampling
from miniverl.workers.rollout.hf_cached import HfCached
from miniverl.workers.rollout.hf_reference import HfReference

BATCH = 16
PROMPT_TOKENS = range(56, 73)
"""Lengths of the prompts; ragged, as real ones are."""
CONTENDERS = ("hf_cached", "hf_reference", "generate", "bare limit")


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    make: Callable[[], Made]
    new_tokens: int
    reference_tokens: int
    """hf_reference runs this many: all of SmolLM2's would take a quarter of an hour."""


class Contest:
    """One model, all contenders, and what they wrote last."""

    def __init__(self, case: Case, outcome: Outcome) -> None:
        self.case, self.outcome = case, outcome
        made = case.make()
        outcome.note(f"{case.name}: {made.note}")
        config = ModelConfig(path=str(made.path))
        tokenizer = load_tokenizer("student", config)
        self.model = load_model(
            "student", config, vocab_size=len(tokenizer), device=torch.device("cpu"), seed=0
        )
        self.prompts = real_text_prompts(tokenizer)
        self.requests = [Request(f"bench/{i}#0", tuple(p)) for i, p in enumerate(self.prompts)]
        self.cached = HfCached(self.model, BATCH, cuda_graphs=False)
        self.reference = HfReference(self.model, BATCH)
        self.bare = Bare(self.model.causal_lm)
        self.generate = Generate(self.model, self.prompts, case.new_tokens)
        self.wrote: dict[str, list[list[Completion]]] = {}

    def run(self, rounds: int) -> dict[str, list[Spent]]:
        case = self.case
        self._warm_up()
        return in_turn(
            {
                "hf_cached": lambda: self._engine("hf_cached", self.cached, case.new_tokens),
                "hf_reference": lambda: self._engine("hf_reference", self.reference, case.reference_tokens),
                "generate": self.generate,
                "bare limit": lambda: self.bare.generate(self.prompts, case.new_tokens),
            },
            rounds,
        )

    def check(self) -> None:
        """The engines wrote the same tokens, and the bare limit decodes for real, as hf_cached does."""
        cached, reference = self.wrote["hf_cached"], self.wrote["hf_reference"]
        for (mine,), (oracle,) in zip(cached, reference, strict=True):
            if mine.token_ids[: len(oracle.token_ids)] != oracle.token_ids:
                raise ValueError(f"{self.case.name}: hf_cached and hf_reference wrote different tokens")
        n = self.case.reference_tokens
        self.outcome.note(f"{self.case.name}: hf_cached and hf_reference wrote the same {BATCH} × {n} tokens")
        greedy = self.cached.generate(self.requests, sampling(32, greedy=True))
        for (mine,), bare in zip(greedy, self.bare.generate(self.prompts, 32), strict=True):
            if list(mine.token_ids) != bare:
                raise ValueError(f"{self.case.name}: bare limit and greedy hf_cached wrote different tokens")

    def _warm_up(self) -> None:
        self.cached.generate(self.requests, sampling(2))
        self.reference.generate(self.requests, sampling(1))
        self.bare.generate(self.prompts, 2)
        Generate(self.model, self.prompts, 2)()

    def _engine(self, name: str, engine: HfCached | HfReference, new_tokens: int) -> None:
        self.wrote[name] = engine.generate(self.requests, sampling(new_tokens))
        if any(len(c.token_ids) != new_tokens for (c,) in self.wrote[name]):
            raise ValueError(f"{name} stopped before {new_tokens} tokens")


class Generate:
    """transformers.generate, sampling, with the log-prob of every token that it drew."""

    def __init__(self, model: LoadedModel, prompts: list[list[int]], new_tokens: int) -> None:
        self.causal_lm: Any = model.causal_lm
        # What a generation config leaves open is filled from the model's own: it must not name an end either.
        self.causal_lm.generation_config = GenerationConfig()
        longest = max(map(len, prompts))
        self.ids_BP = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        self.mask_BP = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        self.new_tokens = new_tokens
        self.config = GenerationConfig(
            max_new_tokens=new_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )

    def __call__(self) -> None:
        out = self.causal_lm.generate(
            input_ids=self.ids_BP, attention_mask=self.mask_BP, generation_config=self.config
        )
        log_probs = self.causal_lm.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
        if log_probs.shape != (len(self.ids_BP), self.new_tokens):
            raise ValueError(f"generate wrote {tuple(log_probs.shape)} tokens")


def sampling(new_tokens: int, greedy: bool = False) -> Sampling:
    return Sampling(0.0 if greedy else 1.0, 0, 1.0, new_tokens, (), 0)


def real_text_prompts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The openings of docstrings of the standard library, cut to lengths of PROMPT_TOKENS."""
    prompts: list[list[int]] = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        ids = tokenizer(text[:1000], add_special_tokens=False)["input_ids"]
        length = PROMPT_TOKENS[len(prompts) * 7 % len(PROMPT_TOKENS)]
        if len(ids) >= length:
            prompts.append(list(ids[:length]))
        if len(prompts) == BATCH:
            return prompts
    raise ValueError(f"only {len(prompts)} docstrings of the standard library are long enough")


def in_turn(cells: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[Spent]]:
    """A B C A B C …, so that a machine that drifts drifts for all alike."""
    spent: dict[str, list[Spent]] = {name: [] for name in cells}
    for _ in range(rounds):
        for name, run in cells.items():
            with clock(spent[name]):
                run()
    return spent


def summarise(case: Case, spent: dict[str, list[Spent]], outcome: Outcome) -> list[list[str]]:
    """The case's rows, its numbers, and its targets by tokens per CPU-second."""
    per_cpu, rows = {}, []
    for name in CONTENDERS:
        new = case.reference_tokens if name == "hf_reference" else case.new_tokens
        cpu, wall = median([s.cpu for s in spent[name]]), median([s.wall for s in spent[name]])
        tokens = BATCH * new
        per_cpu[name] = tokens / cpu
        outcome.numbers[f"{case.name}/{name}"] = {
            "new_tokens": new,
            "tokens_per_s": tokens / wall,
            "tokens_per_cpu_s": tokens / cpu,
            "cpu_s": [round(s.cpu, 3) for s in spent[name]],
            "wall_s": [round(s.wall, 3) for s in spent[name]],
        }
        rows.append(
            [
                f"{case.name}: {name}",
                str(new),
                f"{tokens / wall:.1f}",
                f"{tokens / cpu:.1f}",
                f"{cpu:.2f}",
                "",
            ]
        )
    for row, name in zip(rows, CONTENDERS, strict=True):
        row[-1] = f"{per_cpu['hf_cached'] / per_cpu[name]:.2f}"
    whole = case.reference_tokens == case.new_tokens
    short = "" if whole else f" (which ran {case.reference_tokens} new tokens)"
    mine = per_cpu["hf_cached"]
    outcome.targets += [
        Target(f"{case.name}: hf_cached / hf_reference{short}", mine / per_cpu["hf_reference"], "≥", 5),
        Target(f"{case.name}: hf_cached / transformers.generate", mine / per_cpu["generate"], "≥", 1.5),
        Target(f"{case.name}: hf_cached / bare limit", mine / per_cpu["bare limit"], "≥", 0.8),
    ]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="repetitions that count; medians are over them")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--reference-tokens", type=int, default=4, help="of hf_reference on SmolLM2-135M")
    parser.add_argument("--only", choices=("tiny", "smollm2"))
    args = parser.parse_args()
    one_thread()
    outcome = Outcome("rollout")
    new = args.new_tokens
    cases = {
        "tiny": Case("tiny 7 M", tiny_student, new, new),
        "smollm2": Case("SmolLM2-135M", smollm2, new, min(new, args.reference_tokens)),
    }
    rows: list[list[str]] = []
    for key, case in cases.items():
        if args.only not in (None, key):
            continue

        def cell(case: Case = case) -> None:
            contest = Contest(case, outcome)
            rows.extend(summarise(case, contest.run(args.rounds), outcome))
            contest.check()

        outcome.attempt(case.name, cell)
    if cases["smollm2"].reference_tokens < new and args.only != "tiny":
        outcome.note(
            f"SmolLM2-135M: hf_reference ran {cases['smollm2'].reference_tokens} new tokens, not {new}. Its "
            "tokens/s only falls as responses grow, so the ratio at full length is no smaller."
        )
    columns = ("model: contender", "new tokens", "tokens/s", "tokens/CPU-s", "CPU-s", "hf_cached is ×")
    return outcome.finish(columns, rows)


if __name__ == "__main__":
    sys.exit(main())
