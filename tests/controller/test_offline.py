"""Offline distillation: the cache holds what a live teacher says, and decides whether the teacher loads."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from miniverl.config import AlgoConfig, Config, ConfigError, DataConfig, PlacementConfig
from miniverl.controller.group import WorkerGroup
from miniverl.controller.offline import open_targets, settings
from miniverl.controller.pool import LocalPool
from miniverl.controller.supervised_signals import CachedTeacher
from miniverl.data.prompts import open_data
from miniverl.data.responses import dataset_rollouts
from miniverl.models.digest import model_identity
from miniverl.pack import pack
from miniverl.types import TopKTargets
from miniverl.workers.actor import Actor
from miniverl.workers.reference import Reference
from tests.kit import tiny_tok
from tests.tiny_models import config, tiny, write_model

TOK: Any = tiny_tok()
VOCAB = len(TOK)


@pytest.fixture
def home(tmp_path):
    for role, seed in (("student", 1), ("teacher", 2)):
        write_model(tmp_path / role, tiny("gpt2", vocab=VOCAB, seed=seed))
    rows = [{"prompt": f"hello{i}", "response": "he" * (1 + i % 3)} for i in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def setting(home, **algo: Any) -> Config:
    asked = AlgoConfig(**{"name": "kd", "teacher_top_k": 4, "cache_dir": str(home / "cache"), **algo})
    c = config(str(home / "student"), str(home / "teacher"), dtype="float64", algo=asked)
    return replace(
        c,
        data=DataConfig(source="files", train_files=(str(home / "rows.jsonl"),), response_key="response"),
        trainer=replace(c.trainer, steps=4, prompts_per_step=3),
        rollout=replace(c.rollout, temperature=0.7),
    )


class Watched(LocalPool):
    """A pool that remembers which roles were loaded."""

    def __init__(self, placement: PlacementConfig, device: str) -> None:
        super().__init__(placement, device)
        self.seen: list[str] = []

    def build(self, role: str, worker: Callable[..., Any], *args: Any) -> None:
        self.seen.append(role)
        super().build(role, worker, *args)


def opened(c: Config):
    """The cache, the stream, the sentences said, and the roles that were loaded and let go."""
    told: list[str] = []
    pool = Watched(PlacementConfig(), "cpu")
    stream = open_data(c, TOK, None).train
    assert c.model.teacher is not None
    cache = open_targets(c, c.model.teacher, stream, pool, VOCAB, "cpu", told.append)
    assert pool.hosts[0].workers == {}, "the teacher leaves before the student comes"
    return cache, stream, told, pool.seen


def test_the_first_run_asks_the_teacher_and_the_second_does_not(home):
    c = setting(home)
    _, _, told, seen = opened(c)
    assert seen == ["teacher"] and "scoring 10 sequences" in told[0]
    cache, stream, told, seen = opened(c)
    assert seen == [] and told == [f"teacher targets: all in {home / 'cache'}; the teacher is not loaded"]
    assert c.model.teacher is not None
    teacher = Reference(c, c.model.teacher, VOCAB, "cpu")
    for _ in range(4):
        prompts = stream.take(3)
        rollouts = [r for p in prompts for r in dataset_rollouts(p, 5, 256)]
        batch, _ = CachedTeacher(cache)(prompts, rollouts)
        live = teacher.score(pack(rollouts)).targets
        assert isinstance(batch.targets, TopKTargets) and isinstance(live, TopKTargets)
        assert torch.equal(batch.targets.ids_MK, live.ids_MK)
        torch.testing.assert_close(batch.targets.log_probs_MK, live.log_probs_MK, rtol=1e-12, atol=1e-12)


def test_the_update_is_that_of_a_live_teacher(home):
    """Loss and gradient at temperature 0.7, against GKD's path on the same sequences."""
    c = setting(home, divergence="forward_kl")
    cache, stream, _, _ = opened(c)
    prompts = stream.take(6)
    rollouts = [r for p in prompts for r in dataset_rollouts(p, 0, 256)]
    online = replace(c, algo=replace(c.algo, name="gkd"))
    assert c.model.teacher is not None
    live = Reference(online, c.model.teacher, VOCAB, "cpu").score(pack(rollouts))
    cached, _ = CachedTeacher(cache)(prompts, rollouts)
    gradients = []
    for one, batch in ((c, cached), (online, live)):
        actor = Actor(one, VOCAB, "cpu")
        actor.backward(batch)
        gradients.append({n: p.grad for n, p in actor.trained.items()})
    assert max(float(g.abs().max()) for g in gradients[0].values()) > 1e-3
    for name, g in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], g, rtol=1e-9, atol=1e-12)


def test_a_changed_teacher_row_or_setting_is_scored_anew(home):
    c = setting(home)
    opened(c)
    assert opened(replace(c, trainer=replace(c.trainer, seed=5)))[3] == [], "the order does not matter"
    changed = [
        setting(home, teacher_top_k=3),
        replace(c, rollout=replace(c.rollout, temperature=1.0)),
        replace(c, rollout=replace(c.rollout, max_response_length=1)),
    ]
    for other in changed:
        assert opened(other)[3] == ["teacher"]
        assert opened(other)[3] == []
    rows = (home / "rows.jsonl").read_text()
    (home / "rows.jsonl").write_text(rows.replace("hello7", "hallo7"))
    assert opened(c)[3] == ["teacher"]
    (home / "rows.jsonl").write_text(rows)
    assert opened(c)[3] == []
    before = model_identity("teacher", str(home / "teacher"))
    write_model(home / "teacher", tiny("gpt2", vocab=VOCAB, seed=3))
    assert model_identity("teacher", str(home / "teacher")) != before
    assert opened(c)[3] == ["teacher"]


def test_a_damaged_file_is_told_and_mended(home):
    c = setting(home)
    opened(c)
    (path,) = (home / "cache").iterdir()
    before = load_file(path)
    path.write_bytes(path.read_bytes()[:-1])
    _, _, told, seen = opened(c)
    assert seen == ["teacher"] and str(path) in told[0] and "damaged" in told[0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in load_file(path).items())


def test_only_what_the_run_will_see_is_scored(home):
    c = setting(home)
    few = replace(c, trainer=replace(c.trainer, steps=2))
    assert "scoring 6 sequences" in opened(few)[2][0]
    assert "scoring 10 sequences" in opened(c)[2][0], "all rows, in the order of the file"


def test_a_role_that_is_let_go_takes_no_calls(home):
    pool = LocalPool(PlacementConfig(), "cpu")
    c = setting(home)
    pool.build("teacher", Reference, c, c.model.teacher, VOCAB, "cpu")
    group = WorkerGroup(pool, "teacher")
    assert group.first(Reference.digest)
    pool.drop("teacher")
    with pytest.raises(KeyError):
        group.first(Reference.digest)


def test_settings_name_all_that_decides_what_the_teacher_says(home):
    c = setting(home)
    assert c.model.teacher is not None
    base = settings(c, c.model.teacher, VOCAB)
    half = settings(c, replace(c.model.teacher, dtype="bfloat16"), VOCAB)
    assert {k for k in base if base[k] != half[k]} == {"dtype"}
    assert {k for k in base if base[k] != settings(c, c.model.teacher, VOCAB - 1)[k]} == {"vocabulary"}


def test_what_offline_distillation_needs_is_named():
    with pytest.raises(ConfigError, match=r"set algo\.teacher_top_k"):
        config("student", "teacher", algo=AlgoConfig(name="kd"))
    with pytest.raises(ConfigError, match=r"algo\.name=kd needs a teacher"):
        config("student", algo=AlgoConfig(name="kd", teacher_top_k=4))
