"""On-policy distillation, whole, in one file: torch, transformers and nothing of the framework.

The same experiment as `python -m miniverl.main +experiment=gkd_quick`: a student that forgets carries writes
answers to addition problems, a teacher that never does scores every token, and the student follows the
teacher's distribution on its own answers (reverse KL). For the same seed the losses are those of the
framework, step by step (tests/test_examples.py holds them together). What the framework adds is everything
this file has no need of: a key/value cache, chunks, adapters, Ray, resume, reports.

    python examples/01_whole_loop_in_one_file.py [steps]
"""

import hashlib
import json
import random
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MODELS = Path(__file__).parent.parent / "miniverl" / "models" / "embedded"
SEED, PROMPTS, MAX_NEW_TOKENS, LEARNING_RATE, DIGITS = 0, 32, 64, 1e-4, (2, 3)


def part_of(a: int, b: int) -> str:
    """Held-out problems are told apart by a hash of the operands, so none of them is ever trained."""
    number = int(hashlib.sha256(f"{min(a, b)}+{max(a, b)}".encode()).hexdigest(), 16) % 10
    return {0: "test", 1: "validation"}.get(number, "train")


def problem(index: int) -> tuple[int, int]:
    """The index-th training problem, always the same one."""
    rng = random.Random(f"{SEED}/train/{index}")
    while True:
        a, b = (draw_number(rng) for _ in range(2))
        if part_of(a, b) == "train":
            return a, b


def draw_number(rng: random.Random) -> int:
    digits = rng.randint(*DIGITS)
    return rng.randint(0 if digits == 1 else 10 ** (digits - 1), 10**digits - 1)


def uniform(uid: str, position: int) -> float:
    """Noise in [0, 1) as a function of (seed, prompt, sample 0, position): SplitMix64 started at a hash of
    the key."""
    start = int.from_bytes(hashlib.sha256(f"{SEED}/{uid}/0".encode()).digest()[:8], "big")
    x = (start + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return ((x ^ (x >> 31)) >> 11) * 2.0**-53


@torch.no_grad()
def write_answer(student, prompt: list[int], uid: str, stop: int) -> list[int]:
    """Sample one response at temperature 1, its stop token included."""
    answer: list[int] = []
    while len(answer) < MAX_NEW_TOKENS and answer[-1:] != [stop]:
        logits = student(input_ids=torch.tensor([prompt + answer])).logits[0, -1]
        cumulative = logits.log_softmax(-1).exp().cumsum(-1, dtype=torch.float64)
        point = uniform(uid, len(answer)) * cumulative[-1]
        answer.append(int(torch.searchsorted(cumulative, point, right=True)))
    return answer


def reverse_kl(student_logits, teacher_logits):
    """KL(student‖teacher) of each position, over the whole vocabulary."""
    log_q, log_p = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def main(steps: int) -> list[float]:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "student-no-carry")
    student = AutoModelForCausalLM.from_pretrained(MODELS / "student-no-carry").eval()
    teacher = AutoModelForCausalLM.from_pretrained(MODELS / "teacher").eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(steps):
        # 1. take prompts, and let the student write its own answers to them
        sequences = []
        for index in range(step * PROMPTS, (step + 1) * PROMPTS):
            a, b = problem(index)
            chat = [{"role": "user", "content": f"{a}+{b}="}]
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            answer = write_answer(student, prompt, f"train/{index}#0", tokenizer.eos_token_id)
            sequences.append((prompt, answer))
        # 2. teacher and student look at every answer token; the loss is the mean over all of them
        trained_tokens = sum(len(answer) for _, answer in sequences)
        loss = torch.zeros(())
        for prompt, answer in sequences:
            ids = torch.tensor([prompt + answer])
            predicting = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)  # one place before each token
            mine = student(input_ids=ids).logits[0, predicting]
            yours = teacher(input_ids=ids).logits[0, predicting]
            loss = loss + reverse_kl(mine, yours).sum() / trained_tokens
        # 3. update; the next answers come from the new weights
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step + 1}: loss {losses[-1]:.6f}, {trained_tokens / PROMPTS:.1f} tokens an answer")
    return losses


if __name__ == "__main__":
    print("RESULT " + json.dumps({"losses": main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)}))
