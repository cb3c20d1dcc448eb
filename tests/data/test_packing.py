"""Documents into rows: none lost, none trained twice, none above the limit."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miniverl.config import (
    AdditionConfig,
    AlgoConfig,
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    ModelsConfig,
)
from miniverl.data.demo_tokenizer import build
from miniverl.data.files import load
from miniverl.data.packing import fill_rows, windows
from miniverl.data.prompts import open_data
from miniverl.data.responses import dataset_rollouts
from tests.kit import tiny_tok


@given(st.integers(2, 40), st.integers(2, 12))
def test_every_token_but_the_first_is_predicted_once(length, row_tokens):
    document = tuple(range(length))
    pieces = windows(document, row_tokens)
    assert [i for piece in pieces for i in piece[1:]] == list(range(1, length))
    assert all(2 <= len(piece) <= row_tokens for piece in pieces)


@given(st.lists(st.integers(1, 10), max_size=40), st.integers(10, 25))
def test_rows_hold_every_document_once_and_no_more_than_fits(lengths, row_tokens):
    rows = fill_rows(lengths, row_tokens)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(row and sum(lengths[i] for i in row) <= row_tokens for row in rows)
    filled = sorted(sum(lengths[i] for i in row) for row in rows)
    assert len(filled) < 2 or filled[0] + filled[1] > row_tokens, "two rows would fit into one"


def test_best_fit_by_hand():
    """7 opens a row, 6 another, 4 goes where 4 are left, 3 where 3 are, 2 opens a third."""
    assert fill_rows([2, 3, 4, 6, 7], 10) == [[0], [1, 4], [2, 3]]
    with pytest.raises(ValueError, match="11 tokens does not fit a row of 10"):
        fill_rows([11], 10)


def pretraining(tmp_path, rows, row_tokens=8, **tok: Any):
    file = tmp_path / "x.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = DataConfig(source="files", train_files=(str(file),), row_tokens=row_tokens, shuffle=False)
    config = Config(data=data, algo=AlgoConfig(name="pretrain"))
    return open_data(config, tiny_tok(**tok), None)


def test_texts_end_in_end_of_text_and_share_rows(tmp_path):
    texts = ["hello", "abcdef", "xy", "0123456789"]
    data = pretraining(tmp_path, [{"text": text} for text in texts])
    tok: Any = tiny_tok()
    assert data.notes == ("4 texts were packed into 4 rows of at most 8 tokens",)
    prompts = data.train.take(4)
    documents = [[tok.decode(list(d)) for d in p.documents] for p in prompts]
    end = "<|im_end|>"
    assert documents == [[f"hello{end}"], [f"abcdef{end}"], [f"xy{end}", f"789{end}"], ["01234567"]]
    rollouts = dataset_rollouts(prompts[2], 3, 1)
    assert [(len(r.prompt_ids), len(r.response_ids), r.finish) for r in rollouts] == [
        (1, 2, "length"),
        (1, 3, "length"),
    ]
    assert {r.uid for r in rollouts} == {"train/row2#0"} and rollouts[0].version == (3, 3)


def test_the_tokenizers_own_bos_begins_a_document(tmp_path):
    (prompt,) = pretraining(tmp_path, [{"text": "xy"}], add_bos=True).train.take(1)
    tok: Any = tiny_tok(add_bos=True)
    assert tok.decode(list(prompt.documents[0])) == "<s>xy<|im_end|>"


def test_another_text_or_row_length_is_other_data(tmp_path):
    prints = [
        pretraining(tmp_path, [{"text": "hello"}, {"text": text}], row_tokens).train.fingerprint
        for text, row_tokens in (("ab", 8), ("ac", 8), ("ab", 3), ("ab", 8))
    ]
    assert prints[0] == prints[3] and len(set(prints)) == 3


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "empty (null)"), ("", "an empty text"), (5, "of type int"), (["a"], "of type list")],
)
def test_what_is_no_text_is_named(tmp_path, value, words):
    with pytest.raises(ConfigError) as caught:
        pretraining(tmp_path, [{"text": "hello"}, {"text": value}])
    assert f"x.jsonl row 1: column text: it is {words}" in str(caught.value)


def test_a_missing_column_is_a_wrong_setting(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"content": "hello"}\n')
    data = DataConfig(source="files", train_files=(str(file),))
    tok: Any = tiny_tok()
    with pytest.raises(ConfigError, match=r"data\.text_key=text: .*It has content"):
        load("data.train_files", "train", data, tok, (2,), "texts")


def addition(row_tokens: int):
    config = Config(
        model=ModelsConfig(teacher=ModelConfig()),
        data=DataConfig(addition=AdditionConfig(digits=(1, 2)), row_tokens=row_tokens),
        algo=AlgoConfig(name="pretrain"),
    )
    tok: Any = build()
    return open_data(replace(config, eval=replace(config.eval, size=5)), tok, None).train


def test_addition_texts_are_whole_conversations():
    tok: Any = build()
    stream = addition(128)
    first, second = stream.take(2)
    assert len(first.documents) == len(second.documents) == 2
    for document in first.documents + second.documents:
        said = tok.decode(list(document))
        assert said.startswith("<|im_start|>user\n") and said.endswith("<|im_end|>") and "<think>" in said
    assert len(set(first.documents + second.documents)) == 4
    stream.seek(1)
    assert stream.take(1) == [second]
    with pytest.raises(ConfigError, match=r"row_tokens=20: the longest text, 99\+99= .* has \d\d tokens"):
        addition(20)
