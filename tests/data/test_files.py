"""Files → prompts: which files, which rows, which columns, and the length limit."""

import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from miniverl.config import ConfigError, DataConfig
from miniverl.data.files import BadRow, expand, fit_length, load, read_rows, settle_bad_rows
from miniverl.data.rows import lookup
from tests.kit import chatml, tiny_tok

TOK: Any = tiny_tok()
STOPS = (TOK.eos_token_id,)


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def settings(file, **more):
    return DataConfig(source="files", train_files=(str(file),), **more)


def loaded(file, tok=TOK, **more):
    return load("data.train_files", "train", settings(file, **more), tok, STOPS)


def text(ids):
    return TOK.decode(list(ids))


# ---- which files (DAT-07)


@pytest.fixture
def folder(tmp_path):
    for name in ("b.jsonl", "a.parquet", "c10.jsonl", "c9.jsonl", "note.txt", ".hidden.jsonl"):
        (tmp_path / name).write_text("", encoding="utf-8")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d.jsonl").write_text("", encoding="utf-8")
    return tmp_path


def names(paths):
    return [p.name for p in expand("data.train_files", paths)]


def test_dat_07_every_way_to_name_files(folder):
    """DAT-07: a string, a list, a directory, a glob; sorted within an entry, entries in the order given"""
    assert names(str(folder / "b.jsonl")) == ["b.jsonl"]
    assert names([str(folder / "b.jsonl"), str(folder / "a.parquet")]) == ["b.jsonl", "a.parquet"]
    assert names([str(folder)]) == ["a.parquet", "b.jsonl", "c10.jsonl", "c9.jsonl"]
    assert names((str(folder / "c*.jsonl"),)) == ["c10.jsonl", "c9.jsonl"]
    assert names(str(folder / "**" / "*.jsonl")) == ["b.jsonl", "c10.jsonl", "c9.jsonl", "d.jsonl"]


def test_dat_07_a_file_with_glob_characters_in_its_name_is_a_file(folder):
    """DAT-07"""
    (folder / "x[1].jsonl").write_text("", encoding="utf-8")
    assert names(str(folder / "x[1].jsonl")) == ["x[1].jsonl"]


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        (["b.jsonl", "*.jsonl"], "listed twice"),
        (["b.jsonl", "sub/../b.jsonl"], "listed twice"),
        (["bb.jsonl"], r"does not exist.*Did you mean .*b\.jsonl"),
        (["*.csv"], "matches"),
        (["note.txt"], r"not a \.parquet or \.jsonl"),
        (["empty"], "holds no"),
        ([], "is empty"),
    ],
)
def test_dat_07_what_cannot_be_meant_is_refused(folder, entries, reason):
    """DAT-07"""
    (folder / "empty").mkdir()
    with pytest.raises(ConfigError, match=rf"data\.train_files.*{reason}"):
        expand("data.train_files", [str(folder / e) for e in entries])


# ---- reading (DAT-05, TOK-15, DAT-04)


def test_dat_05_metadata_of_other_libraries_is_ignored(tmp_path):
    """DAT-05: a `huggingface` feature type that nobody here knows"""
    table = pa.table({"prompt": [[{"role": "user", "content": "he"}]], "tags": [["a"]]})
    features = {"info": {"features": {"prompt": {"_type": "List", "feature": {"_type": "FromTheFuture"}}}}}
    pq.write_table(
        table.replace_schema_metadata({"huggingface": json.dumps(features)}), tmp_path / "x.parquet"
    )
    assert [row.values for row in read_rows(tmp_path / "x.parquet")] == [
        {"prompt": [{"role": "user", "content": "he"}], "tags": ["a"]}
    ]
    assert text(loaded(tmp_path / "x.parquet").prompts[0].token_ids).count("he") == 1


def test_dat_04_parquet_and_jsonl_give_the_same_prompts(tmp_path):
    """DAT-04: struct and list columns with rows of different keys, over several row groups"""
    tools = [{"name": "f", "args": {"x": "int"}}, {"name": "g", "args": {"y": "int"}}]
    rows = [
        {"prompt": [{"role": "user", "content": "héllo 世"}], "tools": tools, "r": {"truth": "1"}},
        {
            "prompt": [{"role": "system", "content": "s", "name": "n"}, {"role": "user", "content": "2"}],
            "tools": None,
            "r": {"truth": "2"},
        },
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet", row_group_size=1)
    jsonl(tmp_path / "x.jsonl", rows)
    more: Any = {"tools_key": "tools", "answer_key": "r.truth"}
    a, b = loaded(tmp_path / "x.parquet", **more), loaded(tmp_path / "x.jsonl", **more)
    assert a == b
    assert [p.answer for p in a.prompts] == ["1", "2"]
    assert [p.uid for p in a.prompts] == ["train/0", "train/1"]
    assert '{"name": "f", "args": {"x": "int"}}' in text(a.prompts[0].token_ids)
    assert a.prompts[1].text == "system: s\nuser: 2"


def test_dots_reach_into_structs_unless_a_column_has_them():
    assert lookup({"a": {"b": {"c": 1}}}, "a.b.c") == 1
    assert lookup({"a.b": 2, "a": {"b": 1}}, "a.b") == 2
    for key in ("a.x", "x", "a.b.c.d"):
        with pytest.raises(KeyError):
            lookup({"a": {"b": {"c": 1}}}, key)


def test_byte_order_mark_blank_lines_and_missing_last_newline(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "1"}\n\n  \n{"prompt": "2"}')
    assert [(r.index, r.values) for r in read_rows(tmp_path / "x.jsonl")] == [
        (0, {"prompt": "1"}),
        (3, {"prompt": "2"}),
    ]


def test_a_broken_parquet_file_is_named(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(ConfigError, match=r"x\.parquet cannot be read as parquet"):
        loaded(tmp_path / "x.parquet")


@pytest.mark.parametrize(("key", "hint"), [("promt", "Did you mean prompt"), ("q", "It has answer, prompt")])
def test_a_column_that_no_row_has_is_a_wrong_setting(tmp_path, key, hint):
    file = jsonl(tmp_path / "x.jsonl", [{"prompt": "1", "answer": "1"}] * 2)
    with pytest.raises(ConfigError, match=rf"data\.prompt_key={key}: .*x\.jsonl has no such column.*{hint}"):
        loaded(file, prompt_key=key)
    with pytest.raises(ConfigError, match=r"data\.response_key=r"):
        loaded(file, response_key="r")


# ---- malformed rows (DAT-02)

ROWS = [
    {"prompt": "hello", "r": "he", "answer": 5},
    {"prompt": None, "r": "he", "answer": 5},
    {"prompt": [{"role": "user", "content": None}], "r": "he"},
    {"prompt": [{"content": "x"}], "r": "he"},
    {"prompt": [], "r": "he"},
    {"prompt": "x", "r": None},
    {"r": "he"},
    {"prompt": "x", "r": "he", "answer": [1]},
]


def test_dat_02_malformed_rows_are_all_named(tmp_path):
    """DAT-02: fail fast, naming the rows and the columns, not an unrelated trace"""
    bad = loaded(jsonl(tmp_path / "x.jsonl", ROWS), response_key="r", answer_key="answer")
    assert [b.row for b in bad.bad] == [1, 2, 3, 4, 5, 6, 7]
    assert [p.uid for p in bad.prompts] == ["train/0"]
    assert bad.prompts[0].answer == "5"
    with pytest.raises(ConfigError) as e:
        settle_bad_rows(bad.bad, "error", None)
    for part in (
        "data.malformed_rows=error",
        "7 rows",
        "x.jsonl row 1: column prompt: it is empty (null)",
        "row 3: column prompt: a message has no role",
        "row 5: column r: it is empty",
        "row 7: column answer",
        "quarantine",
    ):
        assert part in str(e.value)
    assert "\n" not in str(e.value)


def test_dat_02_quarantine_lists_them(tmp_path):
    """DAT-02"""
    (tmp_path / "x.jsonl").write_bytes(b'{"prompt": "1"}\nnot json\n[1]\n{"prompt": "\xff"}\n')
    bad = loaded(tmp_path / "x.jsonl").bad
    notes = settle_bad_rows(bad, "quarantine", tmp_path / "run" / "quarantine.jsonl")
    listed = [
        json.loads(line) for line in (tmp_path / "run" / "quarantine.jsonl").read_text("utf-8").splitlines()
    ]
    assert [(row["file"], row["row"]) for row in listed] == [
        (str(tmp_path / "x.jsonl"), i) for i in (1, 2, 3)
    ]
    assert all(row["reason"] for row in listed)
    assert notes == (
        f"3 malformed rows were left out; they are listed in {tmp_path / 'run' / 'quarantine.jsonl'}",
    )
    assert settle_bad_rows([], "quarantine", tmp_path / "none.jsonl") == ()
    assert not (tmp_path / "none.jsonl").exists()


def test_dat_02_many_bad_rows_do_not_flood_the_message():
    """DAT-02"""
    with pytest.raises(ConfigError, match=r"200 rows cannot be used.*; and 190 more"):
        settle_bad_rows([BadRow("f", i, "why") for i in range(200)], "error", None)


# ---- length (DAT-01)

WRAP = "{{ '<s><|im_start|>' + messages[0]['content'] + '<|im_end|><think></think>' }}"  # adds 5 tokens
LENGTHS = (2, 3, 4, 25)  # of the content: 7, 8, 9 and 30 after templating


@pytest.fixture
def long_file(tmp_path):
    return jsonl(tmp_path / "x.jsonl", [{"prompt": "abcdefghijklmnopqrstuvwxy"[:n]} for n in LENGTHS])


def test_dat_01_error_names_row_and_length_after_templating(long_file):
    """DAT-01"""
    with pytest.raises(ConfigError) as e:
        loaded(long_file, tiny_tok(template=WRAP), max_prompt_length=8)
    for part in ("data.max_prompt_length=8", "x.jsonl row 2 (9 tokens)", "row 3 (30 tokens)", "filter"):
        assert part in str(e.value)
    assert "row 1 " not in str(e.value)


@pytest.mark.parametrize(
    ("mode", "kept"),
    [
        ("left", "uvwxy<|im_end|><think></think>"),
        ("right", "<s><|im_start|>abcdef"),
        ("middle", "<s><|im_start|>aby<|im_end|><think></think>"),
    ],
)
def test_dat_01_cut(long_file, mode, kept):
    """DAT-01: exactly the ids that the mode keeps, and never more than the limit"""
    tok = tiny_tok(template=WRAP)
    full = [p.token_ids for p in loaded(long_file, tok).prompts]
    cut = loaded(long_file, tok, max_prompt_length=8, overlong_prompts=mode)
    assert [len(ids) for ids in full] == [7, 8, 9, 30]
    assert [len(p.token_ids) for p in cut.prompts] == [7, 8, 8, 8]
    assert [p.token_ids for p in cut.prompts[:2]] == full[:2]
    assert text(cut.prompts[3].token_ids) == kept
    assert cut.notes == (f"2 of 4 prompts of data.train_files over 8 tokens were cut to it ({mode})",)


def test_dat_01_filter_counts_what_it_leaves_out(long_file):
    """DAT-01"""
    left = loaded(long_file, tiny_tok(template=WRAP), max_prompt_length=8, overlong_prompts="filter")
    assert [p.uid for p in left.prompts] == ["train/0", "train/1"]
    assert left.notes == ("2 of 4 prompts of data.train_files over 8 tokens were left out",)
    with pytest.raises(
        ConfigError, match=r"no prompt is left of 4 rows.*4 are over data\.max_prompt_length=6"
    ):
        loaded(long_file, tiny_tok(template=WRAP), max_prompt_length=6, overlong_prompts="filter")


@pytest.mark.parametrize("limit", range(1, 12))
@pytest.mark.parametrize("mode", ["left", "right", "middle", "filter", "error"])
def test_dat_01_fit_length_keeps_its_promise(limit, mode):
    """DAT-01"""
    ids = tuple(range(9))
    fitting = fit_length(ids, limit, mode)
    if limit >= 9:
        assert fitting == ids
    elif mode in ("filter", "error"):
        assert fitting is None
    else:
        assert fitting is not None and len(fitting) == limit and list(fitting) == sorted(set(fitting))


# ---- references


def test_references_carry_stop_id_and_mask(tmp_path):
    file = jsonl(tmp_path / "x.jsonl", [{"prompt": "he", "r": "hello"}])
    tok = tiny_tok(template=chatml(boilerplate="<think></think>"))
    prompt = loaded(file, tok, response_key="r").prompts[0]
    assert text(prompt.reference_ids) == "<think></think>hello<|im_end|>"
    assert prompt.reference_mask == (0, 0, 1, 1)
    assert text(prompt.token_ids) == "<|im_start|>user\nhe<|im_end|>\n<|im_start|>assistant\n"
    assert loaded(file, tok).prompts[0].reference_ids is None


# ---- pairs and labels

PAIR = {"prompt": "hello", "chosen": "he", "rejected": "h"}


def test_a_pair_is_two_responses_to_one_prompt(tmp_path):
    file = jsonl(tmp_path / "x.jsonl", [PAIR])
    (prompt,) = load("data.train_files", "train", settings(file), TOK, STOPS, "pairs").prompts
    assert text(prompt.token_ids).endswith("<|im_start|>assistant\n")
    assert text(prompt.reference_ids) == "he<|im_end|>" and set(prompt.reference_mask or ()) == {1}
    assert text(prompt.rejected_ids) == "h<|im_end|>" and set(prompt.rejected_mask or ()) == {1}
    renamed = jsonl(tmp_path / "y.jsonl", [{"prompt": "hello", "good": "he", "bad": "h"}])
    data = settings(renamed, chosen_key="good", rejected_key="bad")
    (again,) = load("data.train_files", "train", data, TOK, STOPS, "pairs").prompts
    assert again == prompt


@pytest.mark.parametrize(("value", "verdict"), [(True, True), (False, False), (1, True), (0.0, False)])
def test_a_label_is_true_or_false_in_either_writing(tmp_path, value, verdict):
    file = jsonl(tmp_path / "x.jsonl", [{"prompt": "hello", "r": "he", "label": value}])
    data = settings(file, response_key="r")
    (prompt,) = load("data.train_files", "train", data, TOK, STOPS, "labels").prompts
    assert prompt.desirable is verdict and text(prompt.reference_ids) == "he<|im_end|>"


@pytest.mark.parametrize(
    ("rows", "row", "words"),
    [
        ("pairs", {**PAIR, "rejected": "he"}, "columns chosen and rejected hold the same response"),
        ("pairs", {**PAIR, "chosen": None}, "column chosen: it is empty (null)"),
        ("pairs", {"prompt": "hello", "chosen": "he"}, "column rejected: it is empty (null)"),
        ("labels", {"prompt": "hello", "r": "he", "label": "yes"}, "column label: 'yes' is no label"),
        ("labels", {"prompt": "hello", "r": "he", "label": 2}, "column label: 2 is no label"),
        ("labels", {"prompt": "hello", "r": "he"}, "column label: None is no label"),
    ],
)
def test_a_malformed_pair_or_label_is_named(tmp_path, rows, row, words):
    good = {**PAIR, "r": "he", "label": True}
    file = jsonl(tmp_path / "x.jsonl", [good, row])
    found = load("data.train_files", "train", settings(file, response_key="r"), TOK, STOPS, rows)
    assert len(found.prompts) == 1
    assert [(bad.row, bad.reason[: len(words)]) for bad in found.bad] == [(1, words)]


@pytest.mark.parametrize(("rows", "key"), [("pairs", "chosen"), ("pairs", "rejected"), ("labels", "label")])
def test_a_file_without_the_column_is_a_wrong_setting(tmp_path, rows, key):
    row = {"prompt": "hello", "r": "he", "chosen": "a", "rejected": "b", "label": 1}
    row.pop(key)
    file = jsonl(tmp_path / "x.jsonl", [row])
    with pytest.raises(ConfigError, match=rf"data\.{key}_key={key}: .*no such column\. It has "):
        load("data.train_files", "train", settings(file, response_key="r"), TOK, STOPS, rows)
