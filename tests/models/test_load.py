"""Models by role: adapters, exports, heads, refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    GenerationConfig,
)

from miniverl.config import ConfigError, LoraConfig, ModelConfig
from miniverl.models.digest import module_digest
from miniverl.models.load import LoadedModel, eos_ids, load_model, load_tokenizer
from miniverl.workers.actor import Actor
from tests.kit import tiny_tok
from tests.tiny_models import KINDS, VOCAB, config, ragged_batch, tiny, write_model

IDS = torch.tensor([[3, 7, 5, 9], [1, 1, 30, 2]])


def load(model: ModelConfig, role: str = "student", vocab: int = VOCAB, seed: int = 0) -> LoadedModel:
    return load_model(role, model, vocab_size=vocab, device=torch.device("cpu"), seed=seed)


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_comes_back_in_its_parts(kind, tmp_path):
    model = tiny(kind)
    got = load(ModelConfig(path=write_model(tmp_path, model)), vocab=28)
    torch.testing.assert_close(logits_of(got.causal_lm), logits_of(model), rtol=1e-5, atol=1e-5)
    assert not got.causal_lm.training and got.adapter is None
    head = got.head
    assert head.weight_VH.shape[0] == 28
    assert head.weight_VH.data_ptr() == got.causal_lm.get_output_embeddings().weight.data_ptr()  # type: ignore[union-attr]
    assert (head.bias_V is not None) == (kind == "phi")
    with torch.no_grad():
        hidden = got.backbone(input_ids=IDS).last_hidden_state
        rebuilt = torch.nn.functional.linear(hidden, head.weight_VH, head.bias_V)
    torch.testing.assert_close(rebuilt, logits_of(model)[..., :28], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_weights_are_held_as_asked(dtype: Literal["bfloat16", "float64"], tmp_path):
    got = load(ModelConfig(path=write_model(tmp_path, tiny("qwen3")), dtype=dtype))
    assert {p.dtype for p in got.causal_lm.parameters()} == {getattr(torch, dtype)}


def test_an_adapter_is_alpha_over_rank_b_a(tmp_path):
    path = write_model(tmp_path, tiny("qwen2"))
    lora = LoraConfig(rank=2, alpha=6.0, target_modules=("q_proj", "down_proj"))
    adapted = load(ModelConfig(path=path, lora=lora))
    parameters = dict(adapted.causal_lm.named_parameters())
    trained = {n for n, p in parameters.items() if p.requires_grad}
    assert trained and all(".lora_A." in n or ".lora_B." in n for n in trained)
    plain = load(ModelConfig(path=path))
    torch.testing.assert_close(logits_of(adapted.causal_lm), logits_of(plain.causal_lm))  # B starts at 0
    torch.manual_seed(5)
    with torch.no_grad():
        for name in trained:
            parameters[name].copy_(torch.randn_like(parameters[name]))
        for i in range(2):
            for module in ("self_attn.q_proj", "mlp.down_proj"):
                stem = f"model.layers.{i}.{module}"
                a, b = (parameters[f"{stem}.lora_{x}.default.weight"] for x in "AB")
                plain.causal_lm.get_parameter(f"{stem}.weight").add_(6.0 / 2 * b @ a)
    torch.testing.assert_close(logits_of(adapted.causal_lm), logits_of(plain.causal_lm), rtol=1e-4, atol=1e-4)


def test_adapters_start_from_the_seed_and_leave_the_head_alone(tmp_path):
    model = ModelConfig(path=write_model(tmp_path, tiny("llama")), lora=LoraConfig(rank=2))
    digests = [module_digest(load(model, seed=s).causal_lm) for s in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]
    assert not any("lm_head" in n for n, p in load(model).causal_lm.named_parameters() if p.requires_grad)


def test_random_weights_are_a_function_of_the_seed(tmp_path):
    model = ModelConfig(path=write_model(tmp_path, tiny("qwen3")), init="random")
    torch.manual_seed(99)  # whatever was drawn before
    digests = [module_digest(load(model, seed=s).causal_lm) for s in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]
    assert digests[0] != module_digest(load(replace(model, init="pretrained")).causal_lm)


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_an_export_is_what_plain_transformers_loads(kind, tmp_path):
    actor = Actor(config(write_model(tmp_path / "m", tiny(kind, tied=True))), VOCAB, "cpu")
    actor.update(ragged_batch([(3, 4), (2, 5)]))
    actor.export(str(tmp_path / "export"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    torch.testing.assert_close(logits_of(again), logits_of(actor.model.causal_lm))
    assert not list((tmp_path / "export").glob("*.bin"))


def test_an_adapter_export_is_what_peft_loads(tmp_path):
    path = write_model(tmp_path / "m", tiny("llama"))
    actor = Actor(config(path, lora=LoraConfig(rank=2, alpha=4.0)), VOCAB, "cpu")
    for _ in range(2):  # B is 0 at first, so A moves from the second step on
        actor.update(ragged_batch([(3, 4), (2, 5)]))
    actor.export(str(tmp_path / "export"))
    base = AutoModelForCausalLM.from_pretrained(path)
    before = logits_of(base)
    again = PeftModel.from_pretrained(base, str(tmp_path / "export")).eval()
    torch.testing.assert_close(logits_of(again), logits_of(actor.model.causal_lm))
    assert not torch.allclose(logits_of(again), before, atol=1e-6)
    assert (tmp_path / "export" / "adapter_model.safetensors").is_file()
    assert not list((tmp_path / "export").glob("*.bin"))


def test_a_head_with_an_adapter_is_refused(tmp_path):
    model = ModelConfig(
        path=write_model(tmp_path, tiny("llama")), lora=LoraConfig(target_modules=("lm_head",))
    )
    with pytest.raises(ConfigError, match=r"model\.student\.path=.*not a plain linear layer.*target_modules"):
        load(model)


def gemma2(**changes: Any) -> Gemma2ForCausalLM:
    torch.manual_seed(0)
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            initializer_range=0.5,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            **changes,
        )
    )


def test_logits_that_are_not_head_of_hidden_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="soft cap or scale"):
        capped = gemma2(final_logit_softcapping=5.0)
        load(ModelConfig(path=write_model(tmp_path / "capped", capped)), "teacher")
    plain = gemma2()
    plain.config.final_logit_softcapping = None
    load(ModelConfig(path=write_model(tmp_path / "plain", plain)), "teacher")


def test_a_head_narrower_than_the_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="tokenizer knows 40 tokens but the head has only 32 rows"):
        load(ModelConfig(path=write_model(tmp_path, tiny("llama"))), vocab=40)


def test_pickled_weights_are_refused(tmp_path):
    """A .bin file can run code when loaded; nothing here opens one."""
    path = Path(write_model(tmp_path, tiny("llama")))
    (path / "model.safetensors").unlink()
    torch.save(tiny("llama").state_dict(), path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"model\.teacher\.path=.*safetensors"):
        load(ModelConfig(path=str(path)), "teacher")


def test_remote_code_is_refused_unless_asked_for(tmp_path):
    path = Path(write_model(tmp_path, tiny("llama")))
    text = (path / "config.json").read_text()
    custom = text.replace('"model_type": "llama"', '"model_type": "mine", "auto_map": {"AutoConfig": "c.C"}')
    (path / "config.json").write_text(custom)
    marker = tmp_path / "ran"
    (path / "c.py").write_text(f"open({str(marker)!r}, 'w')\n")
    with pytest.raises((ConfigError, ValueError), match=r"trust_remote_code|custom code"):
        load(ModelConfig(path=str(path)), "teacher")
    assert not marker.exists()


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    path = Path(write_model(tmp_path, tiny("llama")))
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.student\.path=.*model\.layers\.1\.mlp\.up_proj\.weight"):
        load(ModelConfig(path=str(path)))


def test_end_of_text_ids_come_from_the_generation_config_then_the_config(tmp_path):
    model = tiny("llama")
    model.config.eos_token_id = 7
    path = Path(write_model(tmp_path / "m", model))
    GenerationConfig(eos_token_id=[5, 6]).save_pretrained(path)
    assert eos_ids("student", ModelConfig(path=str(path))) == [5, 6]
    (path / "generation_config.json").unlink()
    assert eos_ids("student", ModelConfig(path=str(path))) == 7


def test_the_tokenizer_of_a_directory(tmp_path):
    tokenizer = tiny_tok()
    path = write_model(tmp_path, tiny("llama", vocab=len(tokenizer)), tokenizer)
    got = load_tokenizer("student", ModelConfig(path=path))
    assert got.get_vocab() == tokenizer.get_vocab()
    assert got.chat_template == AutoTokenizer.from_pretrained(path).chat_template == tokenizer.chat_template


def test_gradient_checkpointing_does_not_disturb_generation(tmp_path):
    from miniverl.workers.rollout.base import Request, Sampling
    from miniverl.workers.rollout.hf_cached import HfCached

    model = ModelConfig(path=write_model(tmp_path, tiny("qwen3")))
    s = Sampling(1.0, 0, 1.0, max_new_tokens=6, stop_ids=(), seed=0)
    plain, saving = (
        HfCached(load(replace(model, gradient_checkpointing=on)), 8, False).generate(
            [Request("a", (1, 2, 3), (0, 1))], s
        )
        for on in (False, True)
    )
    assert plain == saving
