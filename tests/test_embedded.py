"""The embedded demo family: what its documentation says of it, and that its recipes still make it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from miniverl.config import AdditionConfig, ModelConfig
from miniverl.data import addition
from miniverl.data.template import render_prompt
from miniverl.models.load import LoadedModel, load_tokenizer
from miniverl.models.locate import EMBEDDED
from miniverl.rewards.exact_match import final_answer
from miniverl.workers.rollout.base import Request, Sampling
from miniverl.workers.rollout.hf_cached import HfCached

ROOT = Path(__file__).parent.parent


def accuracy(name: str, digits: tuple[int, int]) -> float:
    """Greedy exact match on 200 test problems, loaded with plain transformers."""
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer("student", ModelConfig(path=f"embedded:{name}"))
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED / name).eval()
    engine = HfCached(LoadedModel(model, model.base_model, None, len(tokenizer)), 256, cuda_graphs=False)
    problems = addition.distinct(0, "test", digits, 200, "test_size")
    texts = [addition.prompt_text(p) for p in problems]
    requests = [Request(str(i), render_prompt(tokenizer, text)) for i, text in enumerate(texts)]
    eos = tokenizer.eos_token_id
    assert isinstance(eos, int)
    answers = engine.generate(requests, Sampling(0.0, 0, 1.0, 64, (eos,), 0))
    texts = [tokenizer.decode(list(a[0].token_ids[:-1])) for a in answers]
    return sum(final_answer(str(t)) == p.answer for t, p in zip(texts, problems, strict=True)) / 200


@pytest.mark.parametrize(("name", "digits", "low", "high"), [
    ("teacher", (1, 3), 0.98, 1.0),
    ("student-low-data", (1, 3), 0.32, 0.42),
    ("student-no-carry", (2, 3), 0.30, 0.40),
])
def test_accuracy_is_what_the_docs_say(name: str, digits: tuple[int, int], low: float, high: float) -> None:
    assert low <= accuracy(name, digits) <= high


def test_family_is_small_and_engines_can_load_it() -> None:
    assert sum(f.stat().st_size for f in EMBEDDED.rglob("*") if f.is_file()) < 10 * 2**20
    for directory in EMBEDDED.iterdir():
        assert json.loads((directory / "config.json").read_text())["head_dim"] >= 32


def test_recipe_starts_as_recorded(tmp_path: Path) -> None:
    """The first losses of the low-data student's recipe, recorded when the shipped weights were made."""
    done = subprocess.run(
        [sys.executable, "-m", "miniverl.main", "+experiment=make_demo_student_low_data",
         "trainer.steps=3", "optim.warmup_steps=3", "eval.size=1", "eval.every=0",
         f"trainer.run_dir={tmp_path}", "trainer.report=false", "trainer.sinks=[jsonl]"],
        cwd=ROOT, capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [line["actor/nll_loss"] for line in lines if "actor/nll_loss" in line]
    assert losses[0] == pytest.approx(torch.tensor(86.0).log().item(), abs=0.35)  # untrained: about uniform
    assert losses == pytest.approx(RECORDED, rel=1e-4)


RECORDED = [4.46485014, 3.98355097, 3.65785899]


def test_held_out_problems_are_never_trained() -> None:
    """Training draws and the test part share no unordered pair, one-digit pairs included."""
    digits = AdditionConfig().digits
    test = {p.pair for p in addition.distinct(0, "test", (1, 2), 300, "x")}
    trained = {addition.draw(seed, "train", i, (1, 2)).pair for seed in (0, 1) for i in range(4000)}
    assert not test & trained and any(max(p) < 10 for p in test) and digits == (2, 3)
