"""Groups of workers in this process: order, shares, merged metrics, weight versions, evaluation, pairing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from miniverl.config import Config, PlacementConfig, RolloutConfig, RunError
from miniverl.controller.evaluate import Evaluator
from miniverl.controller.group import WorkerGroup
from miniverl.controller.pool import LocalPool
from miniverl.controller.scoring import Scoring, open_rewards, sample_rows
from miniverl.controller.sync import sync
from miniverl.data import demo_tokenizer
from miniverl.metrics import Max, Mean, Metric, Min, Sum
from miniverl.pack import pack
from miniverl.types import Batch, HiddenTargets, Prompt, Rollout, TopKTargets
from miniverl.workers.actor import Actor
from miniverl.workers.host import colocated
from miniverl.workers.reference import Reference
from miniverl.workers.rollout.base import Sampling
from miniverl.workers.rollout.worker import RolloutWorker
from tests.tiny_models import config, ragged_batch, tiny, write_model

VOCAB = 86
TRAIN = Sampling(1.0, 0, 1.0, 9, (2,), 5)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Config:
    home = tmp_path_factory.mktemp("models")
    paths = [
        write_model(home / role, tiny("llama", vocab=VOCAB, seed=seed), demo_tokenizer.build())
        for seed, role in enumerate(("student", "teacher"))
    ]
    return config(paths[0], paths[1], rollout=RolloutConfig(max_response_length=9), micro_batch_tokens=4096)


def pool_of(settings: Config, hosts: int) -> LocalPool:
    pool = LocalPool(PlacementConfig(), "cpu", size=hosts)
    pool.build("actor", Actor, settings, VOCAB, "cpu")
    pool.build("rollout", RolloutWorker, settings, colocated("actor"))
    pool.build("teacher", Reference, settings, settings.model.teacher, VOCAB, "cpu")
    return pool


@pytest.fixture(scope="module")
def pools(settings: Config) -> dict[int, LocalPool]:
    return {hosts: pool_of(settings, hosts) for hosts in (1, 2, 3)}


@pytest.fixture(scope="module")
def score(settings: Config) -> Iterator[Scoring]:
    with open_rewards(settings, demo_tokenizer.build(), None) as (train, _):
        yield train


def prompts(count: int, repeat: int = 1) -> list[Prompt]:
    """Prompts of unequal length; with `repeat`, each text occurs that often under uids of its own."""
    random = np.random.default_rng(3)
    made = []
    for i in range(count):
        ids = tuple(int(t) for t in random.integers(6, VOCAB, int(random.integers(2, 14))))
        made += [Prompt(f"row{i}.{k}#0", ids, f"{i}+{i}=", str(2 * i)) for k in range(repeat)]
    return made


def generated(pool: LocalPool, asked: Sequence[Prompt], n: int = 1) -> list[list[Rollout]]:
    group = WorkerGroup(pool, "rollout")
    group.all(RolloutWorker.sync, 0)
    return group.map(RolloutWorker.generate, asked, TRAIN, n=n, lam=1.0)


@pytest.mark.parametrize("hosts", [2, 3])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_rollouts_do_not_depend_on_the_number_of_hosts(
    pools: dict[int, LocalPool], hosts: int, count: int
) -> None:
    asked = prompts(count)
    one, several = (generated(pools[size], asked, n=2) for size in (1, hosts))
    for prompt, a, b in zip(asked, one, several, strict=True):
        assert [r.uid for r in b] == [prompt.uid] * 2
        assert [r.sample for r in b] == [0, 1]
        for x, y in zip(a, b, strict=True):
            assert x.response_ids.tolist() == y.response_ids.tolist()
            assert y.prompt_ids.tolist() == list(prompt.token_ids)
            np.testing.assert_allclose(x.log_probs, y.log_probs, atol=1e-5)


@pytest.mark.parametrize("hosts", [2, 3])
@pytest.mark.parametrize("sizes", [[(3, 4)], [(3, 9), (2, 2), (5, 1), (1, 7), (4, 4)]])
@pytest.mark.parametrize("top_k", [None, 5])
def test_scores_do_not_depend_on_the_number_of_hosts(
    settings: Config, hosts: int, sizes: list[tuple[int, int]], top_k: int | None
) -> None:
    c = replace(settings, algo=replace(settings.algo, teacher_top_k=top_k))
    batch = ragged_batch(sizes, vocab=VOCAB)
    scored = []
    for size in (1, hosts):
        pool = LocalPool(PlacementConfig(), "cpu", size=size)
        pool.build("teacher", Reference, c, c.model.teacher, VOCAB, "cpu")
        scored.append(WorkerGroup(pool, "teacher").shard(Reference.score, batch))
    one, several = scored
    assert several.rows == one.rows == tuple(range(len(sizes)))
    assert several.token_ids_S.tolist() == batch.token_ids_S.tolist()
    assert several.lengths_N.tolist() == batch.lengths_N.tolist()
    assert several.mask_S.tolist() == batch.mask_S.tolist()
    assert several.trained_tokens == batch.trained_tokens
    if isinstance(one.targets, HiddenTargets) and isinstance(several.targets, HiddenTargets):
        torch.testing.assert_close(several.targets.hidden_MH, one.targets.hidden_MH, rtol=0, atol=1e-5)
        return
    assert isinstance(one.targets, TopKTargets) and isinstance(several.targets, TopKTargets)
    assert several.targets.ids_MK.tolist() == one.targets.ids_MK.tolist()
    torch.testing.assert_close(several.targets.log_probs_MK, one.targets.log_probs_MK, rtol=0, atol=1e-5)


@pytest.mark.parametrize("hosts", [2, 3])
def test_losses_do_not_depend_on_the_number_of_hosts(pools: dict[int, LocalPool], hosts: int) -> None:
    batch = ragged_batch([(3, 9), (2, 2), (5, 1), (1, 7), (4, 4)], vocab=VOCAB)
    found = []
    for size in (1, hosts):
        actor, teacher = (WorkerGroup(pools[size], role) for role in ("actor", "teacher"))
        actor.all(Actor.attach_teacher, colocated("teacher", "head"))
        found.append(actor.reduce(Actor.backward, teacher.shard(Reference.score, batch)))
    assert found[0].keys() == found[1].keys()
    assert found[1]["actor/distillation_loss"] == pytest.approx(found[0]["actor/distillation_loss"], abs=1e-6)
    assert found[0]["actor/distillation_loss"] > 1e-3


class Meter:
    """A worker that measures its share."""

    def measure(self, batch: Batch) -> dict[str, Metric]:
        lengths = batch.lengths_N.tolist()
        return {
            "length": Mean(sum(lengths), len(lengths)),
            "share": Mean(int(batch.mask_S.sum()), len(batch.mask_S)),
            "longest": Max(max(lengths)),
            "shortest": Min(min(lengths)),
            "tokens": Sum(sum(lengths)),
        }


@pytest.mark.parametrize("hosts", [1, 2, 3, 4])
def test_metrics_keep_their_denominators(hosts: int) -> None:
    """A quotient of every share would differ: the shares hold 1 and more sequences."""
    batch = ragged_batch([(10, 10), (1, 2), (2, 2), (1, 1)], holes=False)
    pool = LocalPool(PlacementConfig(), "cpu", size=hosts)
    pool.build("meter", Meter)
    found = WorkerGroup(pool, "meter").reduce(Meter.measure, batch)
    assert found == {"length": 29 / 4, "share": 15 / 29, "longest": 20, "shortest": 2, "tokens": 29}


def test_fewer_items_than_hosts_call_nobody_for_nothing() -> None:
    pool = LocalPool(PlacementConfig(), "cpu", size=3)
    pool.build("meter", Meter)
    batch = ragged_batch([(3, 4)], holes=False)
    assert WorkerGroup(pool, "meter").reduce(Meter.measure, batch)["shortest"] == 7


def test_a_repeated_text_is_a_group_of_its_own(pools: dict[int, LocalPool], score: Scoring) -> None:
    asked = prompts(2, repeat=2)
    groups = generated(pools[2], asked, n=4)
    scored, _ = score(asked, groups)
    assert [r.uid for r in scored] == [p.uid for p in asked for _ in range(4)]
    assert [r.sample for r in scored] == [0, 1, 2, 3] * 4
    assert len({r.uid for r in scored}) == 4
    first, twin = groups[0], groups[1]
    assert first[0].prompt_ids.tolist() == twin[0].prompt_ids.tolist()
    assert [r.response_ids.tolist() for r in first] != [r.response_ids.tolist() for r in twin]
    rows = sample_rows(asked, scored, demo_tokenizer.build(), 99)
    assert [row["prompt"] for row in rows] == ["0+0="] * 8 + ["1+1="] * 8


def test_rewards_are_paired_by_uid_or_not_at_all(score: Scoring) -> None:
    tokenizer = demo_tokenizer.build()
    asked = prompts(3)
    right = tokenizer.encode("4", add_special_tokens=False)
    answers = [
        Rollout(uid, 0, np.array([7]), np.array([*right, 2]), np.ones(2), np.zeros(2), (0, 0), "stop")
        for uid in (p.uid for p in asked)
    ]
    scored, metrics = score(asked, [[a] for a in answers])
    assert [dict(r.rewards) for r in scored] == [{"exact_match": s} for s in (0.0, 0.0, 1.0)]  # 2+2
    assert metrics["reward/exact_match/mean"] == 1 / 3
    assert metrics["reward/failures"] == metrics["reward/exact_match/failures"] == 0
    with pytest.raises(ValueError, match=r"row1.*row0"):
        score(asked, [[answers[i]] for i in (1, 0, 2)])


def test_rewards_go_to_their_own_rollouts_for_any_batch_order(pools: dict[int, LocalPool]) -> None:
    """The order in which prompts are asked does not change what anyone answers."""
    asked = prompts(6)
    forward, backward = generated(pools[2], asked), generated(pools[3], asked[::-1])
    answers = [[group[0].response_ids.tolist() for group in groups] for groups in (forward, backward[::-1])]
    assert answers[0] == answers[1]
    assert [group[0].uid for group in backward] == [p.uid for p in asked[::-1]]


def test_engine_holds_the_actors_weights_after_a_sync(settings: Config) -> None:
    pool = pool_of(settings, 1)
    actor, rollout = WorkerGroup(pool, "actor"), WorkerGroup(pool, "rollout")
    teacher = WorkerGroup(pool, "teacher")
    actor.all(Actor.attach_teacher, colocated("teacher", "head"))
    sync(actor, rollout, 0)
    before = actor.first(Actor.identity)
    assert rollout.all(RolloutWorker.sync, 0) == [before]
    asked = prompts(3)
    old = rollout.map(RolloutWorker.generate, asked, TRAIN, n=1, lam=1.0)
    actor.reduce(Actor.update, teacher.shard(Reference.score, pack([r for group in old for r in group])))
    assert actor.first(Actor.identity) != before, "an update is visible in the identity"
    sync(actor, rollout, 1)
    new = rollout.map(RolloutWorker.generate, asked, TRAIN, n=1, lam=1.0)
    assert {r.version for group in old for r in group} == {(0, 0)}
    assert {r.version for group in new for r in group} == {(1, 1)}
    assert any((a[0].log_probs[:1] != b[0].log_probs[:1]).any() for a, b in zip(old, new, strict=True))


def test_engine_with_another_module_is_refused(settings: Config) -> None:
    """Even one with the same bytes: it would miss the next update."""
    pool = LocalPool(PlacementConfig(), "cpu")
    pool.build("actor", Actor, settings, VOCAB, "cpu")
    pool.build("twin", Actor, settings, VOCAB, "cpu")
    pool.build("rollout", RolloutWorker, settings, colocated("twin"))
    assert pool.wait([pool.call(0, role, "digest", (), {}) for role in ("actor", "twin")], "digests")[0]
    with pytest.raises(RunError, match="version 3") as caught:
        sync(WorkerGroup(pool, "actor"), WorkerGroup(pool, "rollout"), 3)
    assert "does not hold the actor's weights" in str(caught.value)


def test_evaluation_draws_with_its_own_sampling(settings: Config, score: Scoring) -> None:
    """Training at T=1 with at most 9 tokens, evaluation greedy with at most 17: what comes out is argmax."""
    pool = pool_of(settings, 1)
    actor, rollout = WorkerGroup(pool, "actor"), WorkerGroup(pool, "rollout")
    sync(actor, rollout, 0)
    greedy = Sampling(0.0, 0, 1.0, 17, (2,), 5)
    asked = tuple(prompts(4))
    metrics, rollouts = Evaluator(rollout, asked, greedy, score)()
    model = tiny("llama", vocab=VOCAB, seed=0)
    for prompt, found in zip(asked, rollouts, strict=True):
        ids = list(prompt.token_ids)
        for _ in range(17):
            with torch.no_grad():
                ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == 2:
                break
        assert found.response_ids.tolist() == ids[len(prompt.token_ids) :]
    lengths = [len(r.response_ids) for r in rollouts]
    assert max(lengths) > TRAIN.max_new_tokens
    assert metrics["val/response_length/max"] == max(lengths)
    assert metrics["val/response_length/clip_ratio"] == sum(n == 17 for n in lengths) / 4
    assert metrics["val/accuracy"] == sum(r.rewards["exact_match"] for r in rollouts) / 4


def test_evaluation_counts_repeated_prompts_apart(pools: dict[int, LocalPool], score: Scoring) -> None:
    asked = tuple(prompts(2, repeat=3))
    group = WorkerGroup(pools[2], "rollout")
    group.all(RolloutWorker.sync, 0)
    _, rollouts = Evaluator(group, asked, TRAIN, score)()
    assert [r.uid for r in rollouts] == [p.uid for p in asked]


def test_nothing_held_out_is_nothing_measured(pools: dict[int, LocalPool], score: Scoring) -> None:
    evaluate = Evaluator(WorkerGroup(pools[1], "rollout"), (), TRAIN, score)
    assert evaluate() == ({}, [])


def test_closing_a_local_pool_twice() -> None:
    pool = LocalPool(PlacementConfig(), "cpu", size=2)
    pool.build("meter", Meter)
    pool.close()
    pool.close()
    assert pool.size == 2
