"""What only a GPU can prove, in one command: `python -m benchmarks.gpu.check`. Exit status 2 without a GPU.

memory: two steps of the 4080 recipe on random weights, peak beside the plan's and a 16 GiB budget · graphs:
decoding with and without CUDA graphs · engines: hf_cached against hf_reference. `--device cpu --tiny`
rehearses the script.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.experiment import open_loop
from benchmarks.measure import ROOT, Outcome, Target, median, one_thread
from benchmarks.models import CHATML, SPECIALS
from miniverl.config import Config, ModelConfig
from miniverl.controller.plan import GIB, make_plan
from miniverl.controller.pool import LocalPool
from miniverl.main import compose
from miniverl.models.load import LoadedModel, load_model
from miniverl.workers.rollout.base import Completion, Request, Sampling
from miniverl.workers.rollout.cuda_graphs import GraphDecoder
from miniverl.workers.rollout.hf_cached import HfCached
from miniverl.workers.rollout.hf_reference import HfReference

BUDGET = 16 * GIB
QWEN3_TOKENS = 151_669
"""Tokens that Qwen3's tokenizer knows; its models' heads have 151,936 rows."""
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2048,
}
ROUNDS = 3
LOG_PROB_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest difference of a token's log-prob between engines; bfloat16 knows a logit near 8 to 1/32."""


@dataclass(frozen=True)
class Bench:
    """Where and how large."""

    device: str
    tiny: bool
    folder: Path

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def new_tokens(self) -> int:
        return 24 if self.tiny else 128

    @property
    def vocabulary(self) -> int:
        """Tokens of the tokenizer; a head is wider, as Qwen3's is."""
        return 2000 if self.tiny else QWEN3_TOKENS


def write_model(bench: Bench, name: str, seed: int) -> str:
    """A directory with random bfloat16 weights of the published config and a tokenizer of the right size."""
    directory = bench.folder / name
    published = json.loads((ROOT / "conf" / "model" / name / "config.json").read_text(encoding="utf-8"))
    settings = {**published, **TINY} if bench.tiny else published
    (bench.folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    config = AutoConfig.from_pretrained(bench.folder)
    torch.manual_seed(seed)
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = config.eos_token_id = 2
    model.save_pretrained(directory)
    filler_tokenizer(bench.vocabulary).save_pretrained(directory)
    return str(directory)


def filler_tokenizer(tokens: int) -> PreTrainedTokenizerFast:
    """Bytes, ChatML's specials, and as many tokens that no text ever gives as it takes."""
    names = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"<filler {i}>" for i in range(tokens - len(names))]
    core = Tokenizer(BPE({name: i for i, name in enumerate(names)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )


def recipe(bench: Bench, student: str, teacher: str, nf4: bool) -> Config:
    """gkd_4080 as it is, on these two directories and full-length sequences."""
    words = random.Random(0)
    prompts = bench.folder / "prompts.jsonl"
    lines = ("".join(words.choice("abcdefgh ") for _ in range(700)) for _ in range(64))
    prompts.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines), encoding="utf-8")
    settings: dict[str, Any] = {
        "model.student.path": student,
        "model.teacher.path": teacher,
        "data.source": "files",
        "data.train_files": f"[{prompts}]",
        "data.overlong_prompts": "right",
        "rollout.ignore_eos": "true",
        "trainer.steps": 20,
        "trainer.run_dir": bench.folder / "run",
        "trainer.resume": "never",
        "trainer.sinks": "[jsonl]",
        "trainer.report": "false",
        "trainer.export": "false",
        "eval.every": 0,
        "placement": "local",
        "placement.device": bench.device,
        "model.requires_cuda": "false",
    }
    if not nf4:
        settings["model.teacher.quantization"] = "none"
    if bench.tiny:
        settings |= {
            "rollout.max_response_length": 32,
            "data.max_prompt_length": 64,
            "trainer.micro_batch_tokens": 512,
        }
    return compose(["+experiment=gkd_4080", *(f"{key}={value}" for key, value in settings.items())])


def memory(bench: Bench, student: str, teacher: str, outcome: Outcome, rows: list[list[str]]) -> None:
    """Two steps of the recipe under a 16 GiB limit."""
    nf4 = bench.cuda and find_spec("bitsandbytes") is not None
    if not nf4:
        outcome.note("memory: the teacher is in bfloat16, not NF4 (that needs CUDA and requirements/nf4.txt)")
    config = recipe(bench, student, teacher, nf4)
    if bench.cuda:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, BUDGET / whole))
    plan = make_plan(config)
    pool = LocalPool(config.placement, bench.device)
    loop = open_loop(config, pool)
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        loop.step()
        seconds.append(time.perf_counter() - start)
    measured = max(pool.peak_memory_bytes())
    reserved = torch.cuda.max_memory_reserved() if bench.cuda else 0
    loop.record.sinks.close()
    pool.close()
    if bench.cuda:
        torch.cuda.set_per_process_memory_fraction(1.0)
    lines = {line.what.strip(): int(line.size) for line in plan.lines}
    outcome.numbers["memory"] = {
        "measured": measured,
        "estimate": int(plan.estimate),
        "reserved": reserved,
        "lines": lines,
        "nf4_teacher": nf4,
        "step_s": seconds,
    }
    print(plan.table(), flush=True)
    rows.append(
        ["memory: measured peak", f"{measured / GIB:.3f} GiB", f"estimated {plan.estimate / GIB:.3f} GiB"]
    )
    rows.append(
        ["memory: allocator reserved", f"{reserved / GIB:.3f} GiB", f"two steps took {sum(seconds):.1f} s"]
    )
    outcome.targets.append(Target("memory: measured peak", measured / GIB, "≤", BUDGET / GIB, "GiB"))
    if not bench.tiny:
        difference = abs(measured - plan.estimate) / measured
        outcome.targets.append(
            Target("memory: estimate off by (share of measured)", difference, "≤", 0.15, "")
        )


def load(bench: Bench, path: str, dtype: Any) -> LoadedModel:
    config = ModelConfig(path=path, dtype=dtype)
    return load_model(
        "student", config, vocab_size=bench.vocabulary, device=torch.device(bench.device), seed=0
    )


def requests(count: int) -> list[Request]:
    """Ragged prompts of 40 to 70 byte tokens, two samples of every other one."""
    ids = random.Random(1)
    return [
        Request(
            f"check/{i}#0",
            tuple(ids.randrange(3, 259) for _ in range(ids.randint(40, 70))),
            (0, 1)[: 1 + i % 2],
        )
        for i in range(count)
    ]


def sampling(new_tokens: int, *, greedy: bool = False, stops: tuple[int, ...] = ()) -> Sampling:
    return Sampling(0.0 if greedy else 1.0, 0, 1.0, new_tokens, stops, 0)


def flat(groups: list[list[Completion]]) -> list[Completion]:
    return [completion for group in groups for completion in group]


def agreement(mine: list[Completion], theirs: list[Completion]) -> tuple[float, float]:
    """Share of rows with equal tokens, and the largest difference of log-probs before rows part."""
    equal, worst = 0, 0.0
    for a, b in zip(mine, theirs, strict=True):
        equal += a.token_ids == b.token_ids
        for x, y, p, q in zip(a.token_ids, b.token_ids, a.log_probs, b.log_probs, strict=False):
            if x != y:
                break
            worst = max(worst, abs(p - q))
    return equal / len(mine), worst


def graphs(bench: Bench, path: str, dtype: str, outcome: Outcome, rows: list[list[str]]) -> None:
    """Tokens/s with and without graphs; the same tokens, also when rows finish early and leave the batch."""
    model = load(bench, path, dtype)
    engines = {"auto": HfCached(model, 256, True), "off": HfCached(model, 256, False)}
    batch, new = requests(11), bench.new_tokens
    stops = tuple(range(3, bench.vocabulary, 48))
    wanted = {
        "greedy": sampling(new, greedy=True),
        "sampled": sampling(new),
        "rows finish early": sampling(new, stops=stops),
    }
    for what, how in wanted.items():
        share, worst = agreement(*(flat(engine.generate(batch, how)) for engine in engines.values()))
        outcome.numbers[f"graphs/{dtype}/{what}"] = {"rows_equal": share, "log_prob_difference": worst}
        rows.append(
            [f"graphs {dtype}: {what}", f"{share:.0%} of rows equal", f"log-probs differ by ≤ {worst:.2g}"]
        )
        if dtype == "float32":
            outcome.targets.append(Target(f"graphs {dtype}: rows equal, {what}", share, "≥", 1.0, ""))
    speed: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(ROUNDS):
        for name, engine in engines.items():
            start = time.perf_counter()  # generate ends with tokens on the CPU, so nothing is still running
            tokens = sum(len(c.token_ids) for c in flat(engine.generate(batch, sampling(new))))
            speed[name].append(tokens / (time.perf_counter() - start))
    decoder = engines["auto"].decoder
    captured = decoder.buckets if isinstance(decoder, GraphDecoder) else []
    auto, off = (median(speed[name]) for name in engines)
    outcome.numbers[f"graphs/{dtype}"] = {
        "tokens_per_s": {"auto": auto, "off": off},
        "captured_rows": captured,
        "notes": list(engines["auto"].notes),
    }
    rows.append(
        [f"graphs {dtype}: tokens/s", f"{auto:.0f} with, {off:.0f} without", f"captured for rows {captured}"]
    )
    for note in engines["auto"].notes:
        outcome.note(note)
    if bench.cuda:
        outcome.targets.append(Target(f"graphs {dtype}: with / without, tokens/s", auto / off, "≥", 1.0))
        if not captured or engines["auto"].notes:
            raise RuntimeError(f"no graph was captured: {engines['auto'].notes}")


def engines(bench: Bench, path: str, dtype: str, outcome: Outcome, rows: list[list[str]]) -> None:
    """hf_cached against the oracle."""
    model = load(bench, path, dtype)
    batch, how = requests(5), sampling(min(32, bench.new_tokens))
    cached = flat(HfCached(model, 256, True).generate(batch, how))
    share, worst = agreement(cached, flat(HfReference(model, 256).generate(batch, how)))
    outcome.numbers[f"engines/{dtype}"] = {"rows_equal": share, "log_prob_difference": worst}
    rows.append(
        [
            f"engines {dtype}: hf_cached, hf_reference",
            f"{share:.0%} of rows equal",
            f"log-probs differ by ≤ {worst:.2g}",
        ]
    )
    tolerance = LOG_PROB_TOLERANCE[dtype]
    outcome.targets.append(Target(f"engines {dtype}: largest log-prob difference", worst, "≤", tolerance, ""))
    if dtype == "float32":
        outcome.targets.append(Target(f"engines {dtype}: rows equal", share, "≥", 1.0, ""))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="two-layer models: a rehearsal of this script, no proof"
    )
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "benchmarks.gpu.check needs a CUDA GPU that torch can use, and there is none here. "
            "--device cpu --tiny rehearses the script.",
            file=sys.stderr,
        )
        return 2
    if args.device == "cpu" and not args.tiny:
        print("--device cpu needs --tiny: the real models take hours there.", file=sys.stderr)
        return 2
    one_thread()
    outcome = Outcome("gpu_check")
    outcome.note(
        torch.cuda.get_device_name(0) if args.device == "cuda" else "REHEARSAL on the CPU, no GPU was checked"
    )
    rows: list[list[str]] = []
    folder = Path(tempfile.mkdtemp(prefix="miniverl-gpu-"))
    bench = Bench(args.device, args.tiny, folder)
    try:
        student, teacher = write_model(bench, "qwen3-0.6b", 0), write_model(bench, "qwen3-1.7b", 1)
        outcome.attempt("memory", lambda: memory(bench, student, teacher, outcome, rows))
        for dtype in ("float32", "bfloat16"):

            def check_graphs(dtype: str = dtype) -> None:
                graphs(bench, student, dtype, outcome, rows)

            def check_engines(dtype: str = dtype) -> None:
                engines(bench, student, dtype, outcome, rows)

            outcome.attempt(f"graphs {dtype}", check_graphs)
            outcome.attempt(f"engines {dtype}", check_engines)
    finally:
        shutil.rmtree(folder)
    return outcome.finish(("GPU check", "found", ""), rows)


if __name__ == "__main__":
    sys.exit(main())
