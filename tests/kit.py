"""TinyTok: a hand-made byte-level BPE tokenizer with switches for what goes wrong with tokens and templates.

It needs no network and no training: 256 bytes, the merges of "hello", a few special tokens.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

MERGES = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>")
MARKS = ("<think>", "</think>")


def chatml(
    *, markers: bool = True, boilerplate: str = "", bos: bool = False, header: str = "assistant"
) -> str:
    """A ChatML template, which prints the variable `identity` first where one is given.

    boilerplate: what it puts between an assistant's header and content (not in the generation prompt).
    """
    content = "{{ '" + boilerplate + "' + m['content'] + '<|im_end|>' }}"
    opening = "{{ '<|im_start|>" + header + "\\n' }}"
    return (
        ("{{ '<s>' }}" if bos else "") + "{% if identity is defined %}"
        "{{ '<|im_start|>system\\nYou are ' + identity + '<|im_end|>\\n' }}{% endif %}"
        "{% if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
        "{% for m in messages %}{% if m['role'] == 'assistant' %}"
        + opening
        + ("{% generation %}" + content + "{% endgeneration %}" if markers else content)
        + "{{ '\\n' }}{% else %}"
        "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}"
        + opening
        + "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}"
        "{% endif %}"
    )


def tiny_tok(
    *,
    template: str | None = "default",
    pad_is_eos: bool = False,
    add_bos: bool = False,
    eos: str = "<|im_end|>",
    swap: tuple[str, str] | None = None,
    extra: tuple[str, ...] = (),
) -> PreTrainedTokenizerFast:
    """The tokenizer; ids are 0 … 3 for SPECIALS, then MARKS, bytes, merges.

    template: a chat template, "default" for `chatml()`, None for a base model. add_bos: the tokenizer itself
    puts <s> before a text. swap: two tokens that exchange their ids. extra: tokens after all others.
    """
    tokens = [
        *SPECIALS,
        *MARKS,
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *("".join(m) for m in MERGES),
        *extra,
    ]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if swap:
        vocabulary[swap[0]], vocabulary[swap[1]] = vocabulary[swap[1]], vocabulary[swap[0]]
    core = Tokenizer(BPE(vocabulary, MERGES))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIALS])
    core.add_tokens([AddedToken(t, normalized=False, special=False) for t in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token=eos,
        pad_token=eos if pad_is_eos else "<|endoftext|>",
        add_bos_token=add_bos,
        chat_template=chatml() if template == "default" else template,
        clean_up_tokenization_spaces=False,
    )
