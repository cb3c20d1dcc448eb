"""Build a model for a role: weights, precision, quantisation, adapter, output head. Nothing here trains or
samples."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from miniverl.config import ConfigError, ModelConfig
from miniverl.models.locate import locate
from miniverl.types import Head


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A causal language model in its parts."""

    causal_lm: PreTrainedModel
    """The Hugging Face module; with LoRA its linear layers are already the adapted ones."""
    backbone: nn.Module
    """Everything below the head: ids → last hidden states."""
    adapter: PeftModel | None
    vocab_size: int
    """Tokens that the tokenizer knows. A head may be wider (padded); the surplus is never sampled nor
    normalised over."""

    @property
    def head(self) -> Head:
        """The output head cut to the real vocabulary; the same storage, no copy."""
        layer: Any = self.causal_lm.get_output_embeddings()
        bias = layer.bias
        return Head(layer.weight[: self.vocab_size], None if bias is None else bias[: self.vocab_size])

    @property
    def device(self) -> torch.device:
        return self.causal_lm.device


DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def load_tokenizer(role: str, config: ModelConfig) -> PreTrainedTokenizerBase:
    """Raises ConfigError where the model comes without a tokenizer that transformers can read."""
    path = locate(role, config.path)
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(role, config, "tokenizer", error) from error


def eos_ids(role: str, config: ModelConfig) -> int | list[int] | None:
    """End-of-text ids that the model's own generation config names."""
    from transformers import GenerationConfig

    path = locate(role, config.path)
    try:
        return GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # the model ships without one
        pass
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code).eos_token_id
    except (OSError, ValueError) as error:
        raise _unreadable(role, config, "config.json", error) from error


def _unreadable(role: str, config: ModelConfig, what: str, error: Exception) -> ConfigError:
    first = str(error).strip().splitlines()[0]
    return ConfigError(f"model.{role}.path={config.path!r}: its {what} could not be read: {first}")


def load_model(
    role: str, config: ModelConfig, *, vocab_size: int, device: torch.device, seed: int
) -> LoadedModel:
    """Load `model.<role>`, frozen but for what `lora`/full training needs (a teacher's caller freezes the
    rest).

    Raises:
        ConfigError: no such model, quantisation not available, or an output that is not head(hidden).
    """
    path = locate(role, config.path)
    if config.init == "random":
        torch.manual_seed(seed)
        hf_config = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
        causal_lm = AutoModelForCausalLM.from_config(hf_config, dtype=DTYPES[config.dtype])
    else:
        causal_lm = _pretrained(role, config, path, device)
    if config.quantization == "none":
        nn.Module.to(causal_lm, device)
    causal_lm.eval()
    _switch_off_dropout(causal_lm)
    adapter = None
    if config.lora is not None:
        torch.manual_seed(seed)
        adapter = get_peft_model(causal_lm, _peft_config(config))
    if config.gradient_checkpointing:
        causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
        causal_lm.enable_input_require_grads()
    model = LoadedModel(causal_lm, causal_lm.base_model, adapter, vocab_size)
    _check_head(role, config, model)
    return model


def _pretrained(role: str, config: ModelConfig, path: str, device: torch.device) -> PreTrainedModel:
    """Weights from safetensors only: a pickle could run code."""
    quantisation = _quantisation(role, config, device)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            output_loading_info=True,
            dtype=DTYPES[config.dtype],
            trust_remote_code=config.trust_remote_code,
            use_safetensors=True,
            attn_implementation="sdpa",
            **quantisation,
        )
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model.{role}.path={config.path!r} could not be loaded: {first} miniverl reads safetensors only "
            f"(never pickled .bin files); model.{role}.init=random draws fresh weights."
        ) from error
    causal_lm, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:  # transformers would go on with random numbers in their place
        raise ConfigError(
            f"model.{role}.path={config.path!r}: its safetensors lack {len(missing)} of the model's weights "
            f"(first: {', '.join(missing[:3])}); the files are incomplete, or belong to another config.json."
        )
    return causal_lm


def _switch_off_dropout(causal_lm: PreTrainedModel) -> None:
    """The student that learns is the one that writes: with dropout its gradient would belong to another
    model, and would depend on how a batch is cut. (LoRA's dropout is a setting of its own.)"""
    for module in causal_lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if "attention_dropout" in vars(module):
            module.__dict__["attention_dropout"] = 0.0


def _peft_config(config: ModelConfig) -> PeftLoraConfig:
    lora = config.lora
    assert lora is not None
    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    return PeftLoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # PEFT divides it as it is
        lora_dropout=lora.dropout,
        target_modules=targets,  # type: ignore[arg-type]
        task_type="CAUSAL_LM",
    )


def _quantisation(role: str, config: ModelConfig, device: torch.device) -> dict[str, object]:
    if config.quantization == "none":
        return {}
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"model.{role}.quantization=nf4 needs bitsandbytes: pip install -r requirements/nf4.txt, or "
            f"set model.{role}.quantization=none."
        )
    from transformers import BitsAndBytesConfig

    compute = DTYPES[config.dtype]
    four_bit = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
    )
    return {"quantization_config": four_bit, "device_map": {"": device}}


def _check_head(role: str, config: ModelConfig, model: LoadedModel) -> None:
    """Logits must be exactly head(hidden): a soft cap or a scale behind the head would silently change every
    loss."""
    layer = model.causal_lm.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        raise ConfigError(
            f"model.{role}.path={config.path!r}: its output head is a {type(layer).__name__}, not a plain "
            "linear layer; take `lm_head` out of model.student.lora.target_modules, or another model."
        )
    if layer.weight.shape[0] < model.vocab_size:
        raise ConfigError(
            f"model.{role}.path={config.path!r}: the tokenizer knows {model.vocab_size} tokens but the head "
            f"has only {layer.weight.shape[0]} rows."
        )
    ids = torch.tensor([[0, 1]], device=model.device)
    with torch.no_grad():
        logits = model.causal_lm(input_ids=ids).logits
        rebuilt = layer(model.backbone(input_ids=ids).last_hidden_state)
    if not torch.allclose(logits, rebuilt.to(logits.dtype), rtol=1e-3, atol=1e-3):
        raise ConfigError(
            f"model.{role}.path={config.path!r}: its logits are not head(hidden) (a soft cap or scale lies "
            "behind the head), which the chunked losses rely on; choose another model."
        )
