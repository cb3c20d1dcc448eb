"""The order of training and the held-out prompts."""

import itertools
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from miniverl.config import (
    AdditionConfig,
    AlgoConfig,
    Config,
    ConfigError,
    DataConfig,
    EvalConfig,
    ModelConfig,
    ModelsConfig,
    TrainerConfig,
)
from miniverl.config_supervised import PreferenceConfig
from miniverl.data.addition import demonstration, distinct, draw, forgets_carry, part_of, prompt_text
from miniverl.data.demo_tokenizer import build
from miniverl.data.prompts import epoch_order, open_data
from tests.kit import tiny_tok

DEMO: Any = build()


def config(data, seed=0, size=20):
    models = ModelsConfig(teacher=ModelConfig())
    return Config(model=models, data=data, eval=EvalConfig(size=size), trainer=TrainerConfig(seed=seed))


def addition(seed=0, size=20, **task):
    return open_data(config(DataConfig(addition=AdditionConfig(**task)), seed, size), DEMO, None)


@pytest.fixture
def files(tmp_path):
    def make(rows=10, seed=0, size=20, test_rows=5, quarantine=None, tail=(), **more):
        for name, count in (("train", rows), ("test", test_rows)):
            lines = [{"q": f"{name}{i}", "a": str(i)} for i in range(count)] + list(tail)
            (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        data = DataConfig(
            source="files",
            train_files=(str(tmp_path / "train.jsonl"),),
            prompt_key="q",
            answer_key="a",
            eval_files=(str(tmp_path / "test.jsonl"),) if test_rows else (),
            **more,
        )
        return open_data(config(data, seed, size), tiny_tok(), quarantine)

    return make


def uids(prompts):
    return [p.uid for p in prompts]


# ---- files


def test_dat_10_no_remainder_is_dropped(files):
    """DAT-10: 10 prompts in batches of 4: every prompt once per epoch, epochs meet inside a batch"""
    stream = files().train
    seen = uids(itertools.chain.from_iterable(stream.take(4) for _ in range(10)))
    for epoch in range(4):
        assert sorted(seen[10 * epoch : 10 * epoch + 10]) == sorted(f"train/{i}#{epoch}" for i in range(10))
    assert len(set(seen)) == 40
    assert stream.position == 40


def test_a_batch_larger_than_the_data_spans_epochs(files):
    assert Counter(p.text for p in files(rows=3).train.take(9)) == {"train0": 3, "train1": 3, "train2": 3}


def test_order_is_a_function_of_seed_and_epoch(files):
    order = uids(files(seed=1).train.take(30))
    assert order == uids(files(seed=1).train.take(30))
    assert order != uids(files(seed=2).train.take(30))
    rows = [[int(uid.split("/")[1].split("#")[0]) for uid in order[i : i + 10]] for i in (0, 10, 20)]
    assert rows[0] != rows[1] != rows[2]
    assert rows == [epoch_order(10, 1, epoch, True).tolist() for epoch in range(3)]
    assert uids(files(shuffle=False).train.take(12))[8:] == [
        "train/8#0",
        "train/9#0",
        "train/0#1",
        "train/1#1",
    ]


def test_order_is_pinned():
    """Another order would make old checkpoints resume into different data."""
    assert epoch_order(8, 0, 0, True).tolist() == [3, 6, 4, 0, 7, 5, 2, 1]
    assert epoch_order(8, -1, 0, True).tolist() != epoch_order(8, 1, 0, True).tolist()


@pytest.mark.parametrize("consumed", [0, 1, 4, 9, 10, 13, 1007])
def test_ckp_02_seek_resumes_exactly(files, consumed):
    """CKP-02: the position is the whole state"""
    for make in (files, addition):
        straight = make().train
        straight.take(consumed)
        resumed = make().train
        resumed.seek(straight.position)
        assert straight.position == resumed.position == consumed
        assert resumed.take(7) == straight.take(7)
    with pytest.raises(ValueError, match="negative"):
        files().train.seek(-1)


def test_ckp_03_fingerprint_follows_the_data(files):
    """CKP-03: appended, reordered or changed rows, another order, another column: another fingerprint"""
    base = files().train.fingerprint
    assert base == files().train.fingerprint and len(base) == 64
    others = [
        files(rows=11),
        files(rows=9),
        files(seed=1),
        files(shuffle=False),
        files(chat_template_kwargs={"identity": "x"}),
        files(response_key="a"),
        files(tail=[{"q": "x", "a": "1"}]),
    ]
    assert len({base, *(d.train.fingerprint for d in others)}) == 8
    assert files(test_rows=3).train.fingerprint == base


def test_ckp_03_fingerprint_of_reordered_rows(tmp_path):
    """CKP-03"""
    prints = set()
    for order in ("ab", "ba"):
        (tmp_path / "x.jsonl").write_text("".join(f'{{"prompt": "{c}"}}\n' for c in order), encoding="utf-8")
        data = DataConfig(source="files", train_files=(str(tmp_path / "x.jsonl"),))
        prints.add(open_data(config(data), tiny_tok(), None).train.fingerprint)
    assert len(prints) == 2


def test_held_out_files(files):
    data = files(size=3)
    assert [(p.uid, p.text, p.answer) for p in data.held_out] == [
        (f"test/{i}#0", f"test{i}", str(i)) for i in range(3)
    ]
    assert data.notes == ()
    assert files(test_rows=0).held_out == ()
    few = files(size=20)
    assert len(few.held_out) == 5
    assert few.notes == ("data.eval_files hold 5 prompts, fewer than eval.size=20",)


def test_shared_prompts_are_reported(files):
    notes = files(size=6, tail=[{"q": "same", "a": "1"}]).notes
    assert len(notes) == 1 and notes[0].startswith("1 of 6 held-out prompts also occur in data.train_files")


def test_malformed_rows_by_policy(files, tmp_path):
    with pytest.raises(ConfigError, match=r"train\.jsonl row 10: .*test\.jsonl row 5: "):
        files(tail=[{"q": None}])
    data = files(
        tail=[{"q": None}], malformed_rows="quarantine", quarantine=tmp_path / "quarantine.jsonl", size=5
    )
    assert data.notes == (
        f"2 malformed rows were left out; they are listed in {tmp_path / 'quarantine.jsonl'}",
    )
    assert len((tmp_path / "quarantine.jsonl").read_text("utf-8").splitlines()) == 2
    assert len({p.text for p in data.train.take(10)}) == 10
    with pytest.raises(ConfigError, match="all 1 rows are malformed"):
        files(
            rows=0,
            test_rows=2,
            tail=[
                {"q": None, "x": 1},
            ],
            malformed_rows="quarantine",
            quarantine=tmp_path / "quarantine.jsonl",
        )


# ---- addition


def test_addition_prompts_and_demonstrations():
    task = AdditionConfig(digits=(1, 4), forget_carry=0.5)
    mixed = replace(config(DataConfig(addition=task), 5, 20), algo=AlgoConfig(lam=0.5))
    stream = open_data(mixed, DEMO, None).train
    for i, prompt in enumerate(stream.take(60)):
        problem = draw(5, "train", i, (1, 4))
        forget = forgets_carry(5, i, 0.5)
        assert prompt.uid == f"train/{i}#0"
        assert (prompt.text, prompt.answer) == (prompt_text(problem), str(problem.a + problem.b))
        assert DEMO.decode(prompt.token_ids) == (
            f"<|im_start|>user\n{problem.a}+{problem.b}=<|im_end|>\n<|im_start|>assistant\n"
        )
        assert DEMO.decode(prompt.reference_ids) == demonstration(problem, forget) + "<|im_end|>"
        assert set(prompt.reference_mask or ()) == {1}


def test_distinct_problems_come_round_again():
    stream = addition(digits=(2, 3), distinct=7, forget_carry=0.5).train
    prompts = stream.take(20)
    assert uids(prompts) == [f"train/{i % 7}#{i // 7}" for i in range(20)]
    assert [p.text for p in prompts[:7]] == [prompt_text(p) for p in distinct(0, "train", (2, 3), 7, "k")]
    assert len({p.text for p in prompts}) == 7
    assert [(p.text, p.reference_ids) for p in prompts[7:14]] == [
        (p.text, p.reference_ids) for p in prompts[:7]
    ]
    with pytest.raises(ConfigError, match=r"data\.addition\.distinct=100: the train part has only \d\d "):
        addition(digits=(1, 1), distinct=100, size=2, test_size=2)


@pytest.mark.parametrize("digits", [(1, 1), (1, 2), (2, 3)])
def test_held_out_and_training_problems_never_meet(digits):
    """Commuted ones and 1-digit ones included."""
    data = addition(seed=9, digits=digits, size=6, test_size=6)
    held_out = [tuple(sorted(map(int, p.text.rstrip("=").split("+")))) for p in data.held_out]
    trained = {tuple(sorted(map(int, p.text.rstrip("=").split("+")))) for p in data.train.take(2000)}
    assert len(set(held_out)) == 6
    assert all(part_of(*pair) == "test" for pair in held_out)
    assert all(part_of(*pair) == "train" for pair in trained)
    assert not trained & set(held_out)


def test_held_out_problems_are_the_same_for_every_seed_and_size():
    a, b = addition(seed=1, size=20).held_out, addition(seed=2, size=30).held_out
    assert a == b[:20]
    assert addition(seed=1).train.take(5) != addition(seed=2).train.take(5)
    demonstrated = addition(forget_carry=1.0).held_out
    assert demonstrated == addition().held_out, "held-out references are always right"


def test_no_stop_ids_means_the_tokenizers_own():
    """rollout.ignore_eos hands none over: references still end, only rollouts do not."""
    plain = config(DataConfig(addition=AdditionConfig()))
    assert open_data(plain, DEMO, None, ()).train.take(3) == open_data(plain, DEMO, None, (2,)).train.take(3)


def test_settings_that_contradict_the_task():
    with pytest.raises(ConfigError, match=r"data\.addition\.test_size=500.*has only"):
        addition(digits=(1, 1))
    with pytest.raises(ConfigError, match=r"eval\.size=20 .*data\.addition\.test_size=10"):
        addition(test_size=10)
    short = config(DataConfig(addition=AdditionConfig(), max_prompt_length=16))
    with pytest.raises(ConfigError, match=r"data\.max_prompt_length=16.*999\+999=.*set it to \d+"):
        open_data(short, DEMO, None)


def test_ckp_03_fingerprint_of_addition():
    """CKP-03"""
    base = addition().train.fingerprint
    others = [addition(seed=1), addition(digits=(2, 4)), addition(forget_carry=0.1), addition(distinct=5)]
    assert len({base, *(d.train.fingerprint for d in others)}) == 5
    assert base == addition(test_size=50, size=3).train.fingerprint


def preferring(loss, **task):
    plain = config(DataConfig(addition=AdditionConfig(digits=(1, 3), **task)))
    return replace(plain, algo=AlgoConfig(name="preference", preference=PreferenceConfig(loss)))


def answer_of(ids) -> str:
    return DEMO.decode(ids).removesuffix("<|im_end|>").partition("</think>")[2]


def test_addition_pairs_prefer_the_right_answer():
    data = open_data(preferring("dpo"), DEMO, None)
    for prompt in data.train.take(60):
        assert answer_of(prompt.reference_ids) == prompt.answer
        assert answer_of(prompt.rejected_ids) not in ("", prompt.answer)
        assert prompt.desirable is None
    assert data.train.fingerprint != open_data(preferring("kto"), DEMO, None).train.fingerprint


def test_addition_labels_tell_right_from_wrong_and_hold_half_of_each():
    prompts = open_data(preferring("kto"), DEMO, None).train.take(200)
    for prompt in prompts:
        assert prompt.desirable == (answer_of(prompt.reference_ids) == prompt.answer)
        assert prompt.rejected_ids is None
    assert 80 < sum(bool(p.desirable) for p in prompts) < 120


def test_fingerprint_follows_pairs_and_leaves_other_rows_as_they_were(tmp_path):
    """CKP-03: a field that only pairs have must not make old checkpoints of other algorithms unusable."""
    def fingerprint(rows, **algo):
        (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        data = DataConfig(source="files", train_files=(str(tmp_path / "x.jsonl"),))
        return open_data(replace(config(data), algo=AlgoConfig(**algo)), tiny_tok(), None).train.fingerprint

    row = {"prompt": "hello", "chosen": "he", "rejected": "h"}
    prints = [fingerprint([{**row, "rejected": bad}], name="preference") for bad in ("h", "l", "h")]
    assert prints[0] == prints[2] != prints[1]
    plain = {"prompt": "hello", "response": "he"}  # as recorded before there were pairs
    assert fingerprint([plain]) == "d3d64ad54ffe9a17d2df43ea17d2d4fe9de558166cbbe27e9d80866b57bfcdb5"
