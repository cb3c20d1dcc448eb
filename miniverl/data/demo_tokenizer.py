"""The demo family's tokenizer: 86 tokens, one per character, and a ChatML template with generation marks.

It builds and saves the tokenizer; the models that use it are made by the training recipes.
"""

from __future__ import annotations

import string
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

PAD, IM_START, IM_END, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"
SPECIALS = (PAD, IM_START, IM_END, "<think>", "</think>", UNKNOWN)
CHARACTERS = string.digits + "+=;-*/().,?!: \n'\"_" + string.ascii_lowercase + string.ascii_uppercase

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build() -> PreTrainedTokenizerFast:
    """The tokenizer: specials first (pad 0, end of turn 2), then the characters. It never adds a BOS."""
    vocabulary = {token: i for i, token in enumerate((*SPECIALS, *CHARACTERS))}
    core = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()  # the default would put a space between characters
    # The think marks are ordinary tokens: scorers read them, so "skip special tokens" must keep them.
    core.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in ("<think>", "</think>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=IM_END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=[IM_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def write(directory: str | Path) -> None:
    """Save it so that `AutoTokenizer.from_pretrained(directory)` loads it."""
    build().save_pretrained(directory)
