"""Peak memory of the GKD loss, forward and backward, over a vocabulary of 150,000: chunked and not.

Every figure comes from a process of its own: the kernel's high-water mark over what the process held with
heads and hidden states in place. `python -m benchmarks.loss_memory [--tokens 1024] [--hidden 512]`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.measure import ROOT, Outcome, Target, clock, one_thread, read_result
from miniverl.algos.chunked import token_loss
from miniverl.algos.divergences import jsd
from miniverl.algos.objectives import FullDistillation
from miniverl.config import AlgoConfig
from miniverl.types import Head, HiddenTargets
from miniverl.workers.memory import PeakMemory

VOCABULARY = 150_000
BETA = 0.5
CHUNK = 128
DEADLINE_S = 240.0
MIB = 2**20


def inputs(tokens: int, hidden: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Student's hidden states and head (both take gradients), teacher's hidden states and head."""
    torch.manual_seed(0)
    scale = hidden**-0.5
    student, teacher = torch.randn(tokens, hidden), torch.randn(tokens, hidden)
    head, teacher_head = torch.randn(VOCABULARY, hidden) * scale, torch.randn(VOCABULARY, hidden) * scale
    return student.requires_grad_(), head.requires_grad_(), teacher, teacher_head


def ours(student: Tensor, head: Tensor, teacher: Tensor, teacher_head: Tensor, chunk: int) -> Tensor:
    objective = FullDistillation(partial(jsd, beta=BETA), HiddenTargets(teacher), Head(teacher_head), 1.0)
    return token_loss(
        student, Head(head), objective, temperature=1.0, denominator=len(student), chunk_tokens=chunk
    ).loss


def naive(student: Tensor, head: Tensor, teacher: Tensor, teacher_head: Tensor) -> Tensor:
    """The same divergence as one writes it down, with autograd keeping what it needs."""
    log_q = F.log_softmax(student @ head.T, -1)
    with torch.no_grad():
        log_p = F.log_softmax(teacher @ teacher_head.T, -1)
    log_m = torch.logaddexp(log_q, log_p) - torch.log(torch.tensor(2.0))
    terms = BETA * log_p.exp() * (log_p - log_m) + (1 - BETA) * log_q.exp() * (log_q - log_m)
    return terms.sum() / len(student)


def measure_here(cell: str, tokens: int, hidden: int) -> None:
    """One cell, in this fresh process; prints what it took."""
    student, head, teacher, teacher_head = inputs(tokens, hidden)
    ours(
        student[:2], head[:64], teacher[:2], teacher_head[:64], 2
    ).backward()  # what torch sets up on first use
    student.grad = head.grad = None
    memory = PeakMemory("cpu")
    spent: list[Any] = []
    with clock(spent):
        if cell == "naive":
            loss = naive(student, head, teacher, teacher_head)
        else:
            loss = ours(student, head, teacher, teacher_head, tokens if cell == "all" else int(cell))
        loss.backward()
    assert student.grad is not None and head.grad is not None
    result = {
        "peak_mib": memory.peak() / MIB,
        "cpu_s": spent[0].cpu,
        "loss": loss.item(),
        "hidden_grad": student.grad.norm().item(),
        "head_grad": head.grad.norm().item(),
    }
    print("RESULT " + json.dumps(result))


def measure(cell: str, tokens: int, hidden: int) -> dict[str, float]:
    """One cell in a process of its own.

    Raises:
        RuntimeError: it failed, or the kernel tells no high-water mark.
    """
    command = [sys.executable, "-m", "benchmarks.loss_memory", "--cell", cell]
    done = subprocess.run(
        [*command, "--tokens", str(tokens), "--hidden", str(hidden)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        raise RuntimeError(
            f"exit status {done.returncode} (killed for memory?): {done.stderr.strip()[-300:]}"
        )
    result = read_result(done.stdout)
    if result["peak_mib"] <= 0:
        raise RuntimeError("the kernel offers no VmHWM in /proc/self/status")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--cell", help="measure one cell in this process: naive, all, or a chunk's tokens")
    args = parser.parse_args()
    one_thread()
    if args.cell:
        measure_here(args.cell, args.tokens, args.hidden)
        return 0
    return compare(args.tokens, args.hidden)


def compare(tokens: int, hidden: int) -> int:
    """All cells, one after another; the exit status."""
    outcome = Outcome("loss_memory")
    default = AlgoConfig().loss_chunk_tokens
    labels = {
        str(CHUNK): f"chunks of {CHUNK} tokens",
        str(default): f"chunks of {default} tokens (the default)",
        "all": f"one chunk of all {tokens} tokens",
        "naive": "plain autograd",
    }
    found: dict[str, dict[str, float]] = {}
    for key, label in labels.items():

        def cell(key: str = key) -> None:
            found[key] = measure(key, tokens, hidden)

        outcome.attempt(label, cell)
    whole = found.get("all")
    rows = []
    for key, result in found.items():
        ratio = f"{result['peak_mib'] / whole['peak_mib']:.3f}" if whole else ""
        rows.append(
            (
                labels[key],
                f"{result['peak_mib']:.0f}",
                ratio,
                f"{result['cpu_s']:.1f}",
                f"{result['loss']:.6f}",
            )
        )
        outcome.numbers[labels[key]] = result
    losses = [result["loss"] for result in found.values()]
    if losses and max(losses) - min(losses) > 1e-4 * max(losses):
        outcome.failed["losses"] = f"the cells computed different losses: {losses}"
    logits, head = (n * VOCABULARY * 4 / MIB for n in (tokens, hidden))
    outcome.note(
        f"{tokens} tokens, hidden {hidden}, vocabulary {VOCABULARY}, fp32: one [tokens, "
        f"vocabulary] is {logits:.0f} MiB, the head's gradient {head:.0f} MiB (in every figure). A chunk "
        "bounds the memory whatever the number of tokens, so the ratio falls as batches grow."
    )
    chunked = found.get(str(CHUNK))
    ratio = chunked["peak_mib"] / whole["peak_mib"] if chunked and whole else None
    outcome.targets.append(Target(f"loss memory, chunks of {CHUNK} / unchunked, V=150k", ratio, "≤", 0.25))
    return outcome.finish(("GKD loss, forward + backward", "peak MiB", "of unchunked", "CPU-s", "loss"), rows)


if __name__ == "__main__":
    sys.exit(main())
