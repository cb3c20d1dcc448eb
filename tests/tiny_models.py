"""Tiny random models, their directories, and ragged batches: what tests of engines and workers run on.

Weights are drawn wide, so that distributions are peaked and a wrong cache place or mask shows. A test's
expected values are its own business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from miniverl.config import (
    AlgoConfig,
    Config,
    Dtype,
    LoraConfig,
    ModelConfig,
    ModelsConfig,
    OptimConfig,
    RolloutConfig,
    TrainerConfig,
)
from miniverl.models.load import LoadedModel
from miniverl.pack import pack
from miniverl.types import Batch, FinishReason, Rollout

VOCAB = 32
FAMILY = ("llama", "qwen2", "qwen3", "mistral")
KINDS = (*FAMILY, "gpt2", "phi", "windowed")
"""gpt2 (learned positions), phi (bias in the head), windowed (Mistral seeing 4 tokens): ModuleDecoder."""

_SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def tiny(
    kind: str,
    *,
    vocab: int = VOCAB,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tied: bool = False,
    scale: float = 20.0,
) -> PreTrainedModel:
    """A random model in eval mode. `scale` multiplies the usual initial weights (0.02); no dropout."""
    common: dict[str, Any] = {
        "vocab_size": vocab,
        "initializer_range": 0.02 * scale,
        "tie_word_embeddings": tied,
    }
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    torch.manual_seed(seed)
    model: PreTrainedModel
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**_SHAPE, **common, **ids))
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**_SHAPE, **common, **ids))
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**_SHAPE, **common, **ids, head_dim=8))
    elif kind in ("mistral", "windowed"):
        window = 4 if kind == "windowed" else None
        model = MistralForCausalLM(MistralConfig(**_SHAPE, **common, **ids, sliding_window=window))
    elif kind == "phi":
        still: dict[str, Any] = {"attention_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        model = PhiForCausalLM(PhiConfig(**_SHAPE, **common, **ids, **still))
    else:
        still = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        shape: dict[str, Any] = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}
        model = GPT2LMHeadModel(GPT2Config(**shape, **common, **ids, **still))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases start at 0, norms at 1: leaving them out would not show
                parameter.add_(0.3 * torch.randn_like(parameter))
    torch.nn.Module.to(model, dtype)
    return model.eval()


def loaded(model: PreTrainedModel, vocab: int | None = None) -> LoadedModel:
    """The model in its parts, without files."""
    return LoadedModel(model, model.base_model, None, vocab or model.config.vocab_size)


def write_model(
    directory: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> str:
    """Save what a user's model directory holds; returns its path."""
    model.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    return str(directory)


def config(
    student: str,
    teacher: str | None = None,
    *,
    dtype: Dtype = "float32",
    algo: AlgoConfig | None = None,
    rollout: RolloutConfig | None = None,
    optim: OptimConfig | None = None,
    lora: LoraConfig | None = None,
    micro_batch_tokens: int = 4096,
    gradient_checkpointing: bool = False,
) -> Config:
    """A distillation config (supervised without a teacher) over model directories."""
    return Config(
        model=ModelsConfig(
            student=ModelConfig(
                path=student, dtype=dtype, lora=lora, gradient_checkpointing=gradient_checkpointing
            ),
            teacher=None if teacher is None else ModelConfig(path=teacher, dtype=dtype),
        ),
        algo=algo or AlgoConfig(name="gkd" if teacher else "sft"),
        rollout=rollout or RolloutConfig(),
        optim=optim or OptimConfig(),
        trainer=TrainerConfig(micro_batch_tokens=micro_batch_tokens, steps=10),
    )


def small_pieces(c: Config, micro_batch_tokens: int) -> Config:
    """The same config with small micro-batches, its length limits (which tests do not reach) cut to fit."""
    longest = micro_batch_tokens // 2
    return replace(
        c,
        data=replace(c.data, max_prompt_length=micro_batch_tokens - longest),
        rollout=replace(c.rollout, max_response_length=longest),
        trainer=replace(c.trainer, micro_batch_tokens=micro_batch_tokens),
    )


def rollout(
    prompt: Sequence[int],
    response: Sequence[int],
    mask: Sequence[int] | None = None,
    finish: FinishReason = "stop",
) -> Rollout:
    return Rollout(
        uid="p#0",
        sample=0,
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(response, np.int32),
        mask=np.array([1] * len(response) if mask is None else mask, np.int8),
        log_probs=np.zeros(len(response), np.float32),
        version=(0, 0),
        finish=finish,
    )


def ragged_batch(
    lengths: Sequence[tuple[int, int]], *, seed: int = 1, vocab: int = VOCAB, holes: bool = True
) -> Batch:
    """Random sequences of (prompt, response) lengths; `holes` masks a random fifth of the response tokens."""
    random = np.random.default_rng(seed)
    return pack(
        [
            rollout(
                random.integers(0, vocab, prompt).tolist(),
                random.integers(0, vocab, response).tolist(),
                (random.random(response) > 0.2).astype(int).tolist() if holes else None,
            )
            for prompt, response in lengths
        ]
    )
