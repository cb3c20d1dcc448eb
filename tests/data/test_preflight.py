"""Teacher and student must speak the same language."""

from typing import Any

import pytest

from miniverl.config import ConfigError
from miniverl.data.preflight import check_tokenizers, check_vocabulary, stop_ids
from tests.kit import chatml, tiny_tok


def check(student, teacher, mismatch: Any = "refuse", kwargs=None, stops=None):
    theirs = stop_ids(teacher) if stops is None else stops
    return check_tokenizers(student, teacher, stop_ids(student), theirs, mismatch, kwargs)


def test_tok_08_equal_tokenizers_pass():
    """TOK-08"""
    assert check(tiny_tok(), tiny_tok(template=chatml(markers=False), pad_is_eos=True)) == ()
    assert check(tiny_tok(template=None), tiny_tok(template=None)) == ()


def test_tok_08_other_stop_ids():
    """TOK-08: a base teacher with another end of text"""
    student, teacher = tiny_tok(), tiny_tok(eos="<|endoftext|>")
    with pytest.raises(
        ConfigError, match=r"stops at ids \[2\], the teacher at \[0\].*tokenizer_mismatch=allow"
    ):
        check(student, teacher)
    assert len(check(student, teacher, "allow")) == 1
    assert check(student, teacher, stops=(2,)) == ()


def test_tok_08_other_template():
    """TOK-08: templates that differ by two tokens, and a base model without one"""
    student = tiny_tok()
    for teacher in (
        tiny_tok(template=chatml(boilerplate="<think></think>")),
        tiny_tok(template=None),
        tiny_tok(template=chatml(bos=True)),
    ):
        with pytest.raises(ConfigError, match=r"model\.teacher does not fit model.student"):
            check(student, teacher)
        assert len(check(student, teacher, "allow")) == 1
    with pytest.raises(ConfigError, match=r"from token 0 on .*<\|im_start\|>.*<s>"):
        check(student, tiny_tok(template=chatml(bos=True)))


def test_tok_08_another_map_is_never_waived():
    """TOK-08: the same size, two ids exchanged; the difference is named"""
    for mismatch in ("refuse", "allow"):
        with pytest.raises(
            ConfigError, match=r"2 tokens differ.*'hello' is \d+ for the student, \d+ for the teacher"
        ):
            check(tiny_tok(), tiny_tok(swap=("hello", "llo")), mismatch)


def test_tok_08_an_id_with_another_token_is_refused():
    """TOK-08: no token has two ids, but one id has two tokens"""
    with pytest.raises(ConfigError, match=r"id \d+ is 'x1' for the student, 'x2' for the teacher"):
        check(tiny_tok(extra=("x1",)), tiny_tok(extra=("x2",)), "allow")


def test_tok_08_a_critic_reads_the_students_ids_too():
    with pytest.raises(ConfigError, match=r"model\.critic has another vocabulary.*for the critic"):
        check_vocabulary("critic", tiny_tok(), tiny_tok(swap=("hello", "llo")))


def test_tok_08_tokens_that_only_one_has_are_fine():
    """The loss takes the common vocabulary."""
    assert check(tiny_tok(), tiny_tok(extra=("x1", "x2"))) == ()
    assert check(tiny_tok(extra=("x1",)), tiny_tok()) == ()


def test_tok_09_thinking_on_for_one_and_off_for_the_other():
    """TOK-09: only one template reacts to enable_thinking"""
    student = tiny_tok()
    teacher = tiny_tok(template=chatml().replace("enable_thinking", "something_else"))
    assert check(student, teacher) == check(student, teacher, kwargs={"enable_thinking": True}) == ()
    with pytest.raises(ConfigError, match=r"renders to .*chat_template_kwargs"):
        check(student, teacher, kwargs={"enable_thinking": False})


def test_a_template_that_refuses_conversations():
    strict = tiny_tok(
        template=chatml() + "{% if messages | length > 1 %}{{ raise_exception('one only') }}{% endif %}"
    )
    assert check(strict, strict) == ()
    with pytest.raises(ConfigError, match="only the student's chat template takes"):
        check(tiny_tok(), strict)


@pytest.mark.parametrize(
    ("more", "expected"), [(None, (2,)), (2, (2,)), (0, (0, 2)), ([4, 0, 2], (0, 2, 4)), ((), (2,))]
)
def test_stop_ids(more, expected):
    assert stop_ids(tiny_tok(), more) == expected


def test_a_tokenizer_without_end_of_text_has_no_stop_ids():
    tok = tiny_tok()
    tok.eos_token = None
    assert stop_ids(tok) == ()
