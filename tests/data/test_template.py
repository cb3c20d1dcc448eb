"""Rendering and masks: what a model is given, and which of a reference's tokens it is taught."""

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from miniverl.config import ConfigError
from miniverl.data.messages import MalformedRow, to_messages, to_plain, to_tools
from miniverl.data.template import assistant_mask, render_prompt, render_response
from tests.kit import chatml, tiny_tok

CHAT = [
    {"role": "user", "content": "hello?"},
    {"role": "assistant", "content": "hello 世界"},
    {"role": "user", "content": "he?"},
    {"role": "assistant", "content": "\n\nllo\n"},
]
# A template that shows thinking in the last turn only (and always there), and strips what it shows.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% set c = m['content'] %}{% set r = '' %}"
    "{% if m['role'] == 'assistant' and '</think>' in c %}"
    "{% set r = c.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\\n' + r + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ c + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)


def stops(tok: Any) -> tuple[int, ...]:
    return (tok.eos_token_id,)


def text(tok: Any, ids) -> str:
    return tok.decode(list(ids), skip_special_tokens=False)


def trained(tok, ids, mask):
    return text(tok, [i for i, m in zip(ids, mask, strict=True) if m])


# ---- containers (DAT-04) and one rule for strings


@pytest.mark.parametrize(
    "wrap", [list, tuple, lambda m: np.array(m, dtype=object)], ids=["list", "tuple", "ndarray"]
)
def test_dat_04_every_container_of_messages_gives_the_same_ids(wrap):
    """DAT-04"""
    tok = tiny_tok()
    assert render_prompt(tok, wrap(CHAT[:3])) == render_prompt(tok, CHAT[:3])


def test_dat_04_tools_and_kwargs_reach_the_template_as_plain_python():
    """DAT-04: an array of tools is neither ignored nor ambiguous; np.bool_ is a bool."""
    plain = tiny_tok()
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"required": ["a", "b"]}}}]
    arrays = np.array(
        [
            {
                "type": "function",
                "function": {
                    "name": np.str_("add"),
                    "parameters": {"required": np.array(["a", "b"])},
                    "strict": None,
                },
            }
        ],
        dtype=object,
    )
    with_tools = render_prompt(plain, "he", tools)
    assert '"required": ["a", "b"]' in text(plain, with_tools)
    assert render_prompt(plain, "he", arrays) == with_tools
    assert render_prompt(plain, "he", np.array([], dtype=object)) == render_prompt(plain, "he")
    off = render_prompt(plain, "he", None, {"enable_thinking": False})
    assert (
        render_prompt(plain, "he", None, {"enable_thinking": np.bool_(False)})
        == off
        != render_prompt(plain, "he")
    )
    strict = tiny_tok(template="{{ enable_thinking is false }}{{ n is integer }}{{ l is sequence }}")
    seen = render_prompt(
        strict, "he", None, {"enable_thinking": np.bool_(False), "n": np.int64(3), "l": np.array([1, 2])}
    )
    assert text(strict, seen) == "TrueTrueTrue"


def test_dat_04_strings_follow_one_rule():
    """DAT-04: JSON for a list of objects with a role is that conversation; other strings are words."""
    tok = tiny_tok()
    assert render_prompt(tok, '[{"role": "user", "content": "he\\u4e16"}]') == render_prompt(tok, "he世")
    for words in (
        "hello",
        '["a"]',
        "[1, 2]",
        "[]",
        '{"role": "user", "content": "x"}',
        "[broken",
        "null",
        "[" * 50000,
    ):
        assert to_messages(words) == [{"role": "user", "content": words}]


def test_to_plain_leaves_no_numpy():
    value = {"a": np.array([{"b": np.float32(1)}], dtype=object), "c": (np.int64(2), "s", None, True)}
    assert to_plain(value) == {"a": [{"b": 1.0}], "c": [2, "s", None, True]}
    plain: Any = to_plain(value)
    assert type(plain["a"][0]["b"]) is float


def test_keys_that_a_struct_column_invents_are_left_out():
    message = {"role": "user", "content": "x", "tool_calls": None}
    assert to_messages([message]) == [{"role": "user", "content": "x"}]
    assert to_tools([{"name": "f", "args": {"x": {"type": "int", "enum": None}}}]) == [
        {"name": "f", "args": {"x": {"type": "int"}}}
    ]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (None, "null"),
        ([], "list of messages is empty"),
        ([{"role": "user", "content": None}], r"content of a message \(role user\) is empty"),
        ([{"content": "x"}], "no role"),
        ([{"role": "", "content": "x"}], "no role"),
        ([{"role": "user"}], "empty"),
        ([{"role": "user", "content": 3}], "type int"),
        (["x"], "type str"),
        (7, "type int"),
        ({"role": "user", "content": "x"}, "type dict"),
        (CHAT, "ends with an assistant message"),
        ([{"role": "user", "content": ["part"]}], "template refuses it"),
    ],
)
def test_dat_02_what_is_no_prompt_says_why(prompt, reason):
    """DAT-02: at the level of one row"""
    with pytest.raises(MalformedRow, match=reason):
        render_prompt(tiny_tok(), prompt)


# ---- BOS (DAT-11) and tokenizers without a template


@pytest.mark.parametrize("add_bos", [True, False])
def test_dat_11_one_bos_when_template_and_tokenizer_both_add_it(add_bos):
    """DAT-11: prompt, prompt part of SFT data, and the conversation that a teacher reads"""
    tok = tiny_tok(template=chatml(bos=True), add_bos=add_bos)
    bos = tok.bos_token_id
    ids = render_prompt(tok, "hello")
    assert ids.count(bos) == 1 and ids[0] == bos
    response, _ = render_response(tok, "hello", "he", stops(tok))
    assert bos not in response
    whole, _ = assistant_mask(tok, CHAT, stops(tok))
    assert whole.count(bos) == 1 and whole[0] == bos


def test_dat_11_without_a_template_the_tokenizers_own_bos_once():
    """DAT-11"""
    tok = tiny_tok(template=None, add_bos=True)
    assert text(tok, render_prompt(tok, "hello")) == text(tok, render_prompt(tok, "<s>hello")) == "<s>hello"
    without = tiny_tok(template=None)
    assert text(without, render_prompt(without, "hello")) == "hello"


def test_without_a_template_only_plain_text():
    tok = tiny_tok(template=None)
    assert render_prompt(tok, CHAT[:1]) == render_prompt(tok, "hello?")
    ids, mask = render_response(tok, "hello?", "he", stops(tok))
    assert (text(tok, ids), set(mask)) == ("he<|im_end|>", {1})
    for prompt, tools in ((CHAT[:3], None), ("x", [{"name": "f"}])):
        with pytest.raises(MalformedRow, match="no chat template"):
            render_prompt(tok, prompt, tools)
    with pytest.raises(MalformedRow, match="no chat template"):
        assistant_mask(tok, CHAT, stops(tok))


# ---- masks


@pytest.mark.parametrize("markers", [True, False])
@pytest.mark.parametrize("pad_is_eos", [True, False])
def test_tok_02_mask_with_and_without_generation_markers(markers, pad_is_eos):
    """TOK-02: the same, and exactly both turns with their stop id"""
    tok = tiny_tok(template=chatml(markers=markers), pad_is_eos=pad_is_eos)
    ids, mask = assistant_mask(tok, CHAT, stops(tok))
    assert trained(tok, ids, mask) == "hello 世界<|im_end|>\n\nllo\n<|im_end|>"
    assert text(tok, ids) == tok.apply_chat_template(CHAT, tokenize=False)
    reference: Any = tiny_tok(template=chatml(markers=True)).apply_chat_template(
        CHAT, return_dict=True, return_assistant_tokens_mask=True
    )
    assert (list(ids), list(mask)) == (reference["input_ids"], reference["assistant_masks"])


def test_tok_02_markers_can_leave_turns_out_but_not_all():
    """TOK-02: what the template's author excludes is not trained; if that is everything, it is an error"""
    body = chatml(markers=False).replace(
        "{{ '' + m['content'] + '<|im_end|>' }}",
        (
            "{% if loop.last and not nothing %}{% generation %}{{ m['content'] }}{% endgeneration %}"
            "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>' }}"
        ),
    )
    assert "{% generation %}" in body
    tok = tiny_tok(template=body)
    assert trained(tok, *assistant_mask(tok, CHAT, stops(tok))) == "\n\nllo\n<|im_end|>", (
        "its stop id is trained too"
    )
    with pytest.raises(MalformedRow, match="none of its tokens would be trained"):
        assistant_mask(tok, CHAT, stops(tok), None, {"nothing": True})
    with pytest.raises(MalformedRow, match="none of its tokens would be trained"):
        assistant_mask(tok, CHAT[:1], stops(tok))


def test_tok_02_everything_trainable_is_an_error():
    """TOK-02"""
    tok = tiny_tok(template="{% for m in messages %}{{ m['content'] + '<|im_end|>' }}{% endfor %}")
    with pytest.raises(MalformedRow, match="7 of its 7 tokens would be trained"):
        assistant_mask(
            tok, [{"role": "assistant", "content": "abc"}, {"role": "assistant", "content": "de"}], stops(tok)
        )


@pytest.mark.parametrize("identity", ["x", "hello", "世界" * 30, "<|im_start|>assistant\n", "probe"])
@pytest.mark.parametrize("markers", [True, False])
def test_tok_03_kwargs_of_any_length_do_not_shift_the_mask(identity, markers):
    """TOK-03: trainable ids decode to the assistant's words for every value"""
    tok = tiny_tok(template=chatml(markers=markers))
    kwargs = {"identity": identity}
    ids, mask = assistant_mask(tok, CHAT, stops(tok), None, kwargs)
    assert trained(tok, ids, mask) == "hello 世界<|im_end|>\n\nllo\n<|im_end|>"
    prompt = render_prompt(tok, CHAT[:3], None, kwargs)
    response, rmask = render_response(tok, CHAT[:3], CHAT[3]["content"], stops(tok), None, kwargs)
    shown: Any = tok.apply_chat_template(CHAT, tokenize=False, **kwargs)
    assert text(tok, prompt + response) + "\n" == shown
    assert trained(tok, response, rmask) == "\n\nllo\n<|im_end|>"


@pytest.mark.parametrize("markers", [True, False])
def test_tok_11_boilerplate_of_the_template_is_not_trained(markers):
    """TOK-11: two tokens that the template puts after the role header, inside its markers even"""
    tok = tiny_tok(template=chatml(markers=markers, boilerplate="<think></think>"))
    ids, mask = render_response(tok, "he", "hello", stops(tok))
    assert text(tok, ids) == "<think></think>hello<|im_end|>"
    assert mask == (0, 0, 1, 1)
    assert trained(tok, *assistant_mask(tok, CHAT, stops(tok))) == "hello 世界<|im_end|>\n\nllo\n<|im_end|>"


@pytest.mark.parametrize(
    ("response", "kwargs", "shown", "taught"),
    [
        ("hello", {}, "<think>\n\n</think>\n\nhello<|im_end|>", "hello<|im_end|>"),
        ("hello", {"enable_thinking": False}, "hello<|im_end|>", "hello<|im_end|>"),
        (
            "<think>he</think>hello",
            {},
            "<think>\nhe\n</think>\n\nhello<|im_end|>",
            "<think>\nhe\n</think>\n\nhello<|im_end|>",
        ),
    ],
)
def test_tok_11_thinking_is_trained_only_where_the_data_has_it(response, kwargs, shown, taught):
    """TOK-11: a template that shows a think block in every last turn"""
    tok = tiny_tok(template=THINKING)
    ids, mask = render_response(tok, "he?", response, stops(tok), None, kwargs)
    assert (text(tok, ids), trained(tok, ids, mask)) == (shown, taught)


def test_a_reference_that_cannot_follow_the_prompt_is_refused():
    tok = tiny_tok(template=THINKING)
    with pytest.raises(MalformedRow, match="does not begin with the prompt"):
        render_response(tok, "he?", "<think>he</think>hello", stops(tok), None, {"enable_thinking": False})


def test_a_template_that_drops_words_is_refused():
    tok = tiny_tok(template=THINKING)
    chat = [CHAT[0], {"role": "assistant", "content": "<think>he</think>hello"}, *CHAT[2:]]
    with pytest.raises(MalformedRow, match="content of its message 1"):
        assistant_mask(tok, chat, stops(tok))


def test_a_template_without_the_stop_token_is_refused():
    """A base model's end of text with a chat template that ends turns otherwise: no stop to learn."""
    tok = tiny_tok(eos="<|endoftext|>")
    with pytest.raises(MalformedRow, match=r"none of the stop tokens.*rollout\.stop_ids"):
        render_response(tok, "he", "hello", stops(tok))
    assert render_response(tok, "he", "hello", (*stops(tok), 2))[1] == (
        1,
        1,
    )


def test_a_stop_token_inside_the_words_is_refused():
    with pytest.raises(MalformedRow, match="does not show the content"):
        render_response(tiny_tok(), "he", "he<|im_end|>llo", stops(tiny_tok()))


def test_header_that_opens_the_turn_is_part_of_the_prompt():
    """A generation prompt that ends in <think>, which the reference repeats: not twice, and not trained."""
    opened = chatml(markers=False).replace(
        "{{ '<|im_start|>assistant\\n' }}{% if enable",
        ("{{ '<|im_start|>assistant\\n<think>' }}{% if enable"),
    )
    tok = tiny_tok(template=opened)
    ids, mask = render_response(tok, "he", "<think>he</think>hello", stops(tok))
    assert text(tok, render_prompt(tok, "he") + ids).count("<think>") == 1
    assert trained(tok, ids, mask) == "he</think>hello<|im_end|>"


def test_a_merge_over_the_border_does_not_blur_it():
    """Header and response share a merge (…he + llo): the prompt stays, the response is trained whole."""
    tok = tiny_tok(template=chatml(markers=False, header="a").replace("a\\n", "he"))
    ids, mask = render_response(tok, "x", "llo", stops(tok))
    assert text(tok, ids) == "llo<|im_end|>" and set(mask) == {1}
    assert tok("hello", add_special_tokens=False)["input_ids"] == [tok.convert_tokens_to_ids("hello")]
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "llo"}]
    assert trained(tok, *assistant_mask(tok, chat, stops(tok))) == "llo<|im_end|>"


def test_several_turns_with_tools_as_a_response():
    tok = tiny_tok()
    response = [CHAT[1], {"role": "tool", "content": "5"}, CHAT[3]]
    ids, mask = render_response(tok, "hello?", response, stops(tok))
    assert trained(tok, ids, mask) == "hello 世界<|im_end|>\n\nllo\n<|im_end|>"
    assert "<|im_start|>tool\n5<|im_end|>" in text(tok, ids)
    with pytest.raises(MalformedRow, match="does not end with an assistant message"):
        render_response(tok, "hello?", response[:2], stops(tok))


def test_kwargs_that_are_ours_are_refused():
    with pytest.raises(ConfigError, match=r"data\.chat_template_kwargs\.add_generation_prompt"):
        render_prompt(tiny_tok(), "x", None, {"add_generation_prompt": False})


# ---- encodings (TOK-15)

READ = """
import sys
from pathlib import Path
from transformers import AutoTokenizer
from miniverl.data.files import read_rows
from miniverl.data.template import render_prompt
tok = AutoTokenizer.from_pretrained(sys.argv[1])
print([render_prompt(tok, row.values["prompt"]) for row in read_rows(Path(sys.argv[1]) / "x.jsonl")])
"""


def test_tok_15_the_locale_does_not_matter(tmp_path):
    """TOK-15: a non-ASCII template and data file give the same ids under LC_ALL=C"""
    tok = tiny_tok(template="{{ 'Grüße 世: ' + messages[0]['content'] }}")
    tok.save_pretrained(tmp_path)
    (tmp_path / "x.jsonl").write_bytes('{"prompt": "né 🙂"}\n'.encode())
    env = {
        **os.environ,
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "LC_ALL": "C",
        "LANG": "C",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path)], env=env, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert done.stdout.decode().strip() == str([render_prompt(tok, "né 🙂")])
    assert text(tok, render_prompt(tok, "né 🙂")) == "Grüße 世: né 🙂"
