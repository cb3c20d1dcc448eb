"""The demo family's tokenizer, as built and as AutoTokenizer loads it from a model directory."""

import json

import pytest
from transformers import AutoTokenizer

from miniverl.data import demo_tokenizer
from miniverl.data.template import assistant_mask, render_prompt


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    directory = tmp_path_factory.mktemp("demo")
    demo_tokenizer.write(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    return AutoTokenizer.from_pretrained(directory)


def test_a_model_directory_gives_the_same_tokenizer(loaded):
    built = demo_tokenizer.build()
    assert loaded.get_vocab() == built.get_vocab()
    assert loaded.chat_template == built.chat_template
    assert (len(loaded), loaded.pad_token_id, loaded.eos_token_id, loaded.bos_token_id) == (86, 0, 2, None)


def test_one_token_per_character_and_back(loaded):
    text = "<think>6+9+0=15;3+0+1=4</think>445\nAb c? (x/y*z-1), 'q': \"w\"_!."
    ids = loaded(text)["input_ids"]
    assert len(ids) == len(text) - len("<think></think>") + 2
    assert loaded.decode(ids) == text
    assert loaded.decode(ids, skip_special_tokens=True) == text, "think marks are no special tokens"
    assert loaded.unk_token_id not in ids


def test_unknown_characters_are_one_unknown_token_each(loaded):
    assert loaded("1é世")["input_ids"][1:] == [loaded.unk_token_id] * 2


def test_template_is_chatml_with_markers(loaded):
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    assert (
        loaded.decode(render_prompt(loaded, "1+1="))
        == "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    )
    ids, mask = assistant_mask(loaded, messages, (2,))
    assert loaded.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "2<|im_end|>"
    marked = loaded.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    assert (list(ids), list(mask)) == (marked["input_ids"], marked["assistant_masks"])
