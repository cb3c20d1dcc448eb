"""The rollout role: who writes a sample (λ), what a rollout carries, and the version stamped on it."""

from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from miniverl.config import AlgoConfig, RolloutConfig
from miniverl.config_reward import BUILT_IN
from miniverl.rewards.registry import BUILT_INS
from miniverl.types import Prompt
from miniverl.workers.actor import LOSS_NAMES, Actor
from miniverl.workers.rollout.base import Request, Sampling
from miniverl.workers.rollout.worker import ENGINES, RolloutWorker
from tests.tiny_models import VOCAB, config, tiny, write_model

SAMPLING = Sampling(1.0, 0, 1.0, max_new_tokens=5, stop_ids=(2,), seed=3)
PROMPTS = [
    Prompt(f"row{i}#0", (3, 7, 5)[: 1 + i % 3], "", reference_ids=(8, 9, 2), reference_mask=(1, 0, 1))
    for i in range(50)
]


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("student"), tiny("llama", scale=5))


def worker_of(student, engine: Any = "hf_cached"):
    c = config(student, rollout=RolloutConfig(engine=engine))
    actor = Actor(c, VOCAB, "cpu")
    return actor, RolloutWorker(c, actor)


@pytest.mark.parametrize("engine", list(ENGINES))
def test_a_rollout_is_what_the_engine_wrote(student, engine):
    _, worker = worker_of(student, engine)
    worker.sync(4)
    groups = worker.generate(PROMPTS[:4], SAMPLING, n=2, lam=1.0)
    requests = [Request(p.uid, p.token_ids, (0, 1)) for p in PROMPTS[:4]]
    for prompt, group, answer in zip(
        PROMPTS, groups, worker.engine.generate(requests, SAMPLING), strict=False
    ):
        for k, (r, completion) in enumerate(zip(group, answer, strict=True)):
            assert (r.uid, r.sample, r.version, r.source) == (prompt.uid, k, (4, 4), "student")
            assert tuple(r.prompt_ids) == prompt.token_ids
            assert tuple(r.response_ids) == completion.token_ids
            assert r.mask.tolist() == [1] * len(completion.token_ids)  # the sampled stop id is trained
            np.testing.assert_array_equal(r.log_probs, np.array(completion.log_probs, np.float32))
            assert r.finish == ("stop" if r.response_ids[-1] == 2 else "length")


def test_lambda_mixes_sample_by_sample(student):
    _, worker = worker_of(student)
    n = 4
    sources = {}
    for lam in (0.0, 0.3, 0.7, 1.0):
        groups = worker.generate(PROMPTS, SAMPLING, n=n, lam=lam)
        sources[lam] = np.array([[r.source == "student" for r in group] for group in groups])
        # 200 draws: within four standard deviations of the share.
        assert abs(sources[lam].mean() - lam) <= 4 * np.sqrt(lam * (1 - lam) / 200)
    assert not (sources[0.3] & ~sources[0.7]).any()  # a larger share keeps the samples it had
    mixed = sources[0.3].any(1) & ~sources[0.3].all(1)
    assert mixed.sum() > 10  # within a group, too


def test_the_mixture_does_not_depend_on_order_or_call_and_own_samples_are_those_of_lambda_one(student):
    _, worker = worker_of(student)
    worker.sync(0)
    whole = worker.generate(PROMPTS[:9], SAMPLING, n=3, lam=0.5)
    again = worker.generate(PROMPTS[8:2:-1], SAMPLING, n=3, lam=0.5)[::-1]
    pure = worker.generate(PROMPTS[:9], SAMPLING, n=3, lam=1.0)
    for group, expected in zip(again, whole[3:], strict=True):
        for r, e in zip(group, expected, strict=True):
            assert (r.source, r.response_ids.tolist()) == (e.source, e.response_ids.tolist())
    for group, own in zip(whole, pure, strict=True):
        for r, e in zip(group, own, strict=True):
            if r.source == "student":
                assert r.response_ids.tolist() == e.response_ids.tolist()


def test_a_dataset_response_keeps_its_mask_and_has_no_log_probs(student):
    _, worker = worker_of(student)
    worker.sync(6)
    for k, r in enumerate(worker.generate(PROMPTS[:1], SAMPLING, n=2, lam=0.0)[0]):
        assert (r.source, r.sample, r.version, r.finish) == ("dataset", k, (6, 6), "stop")
        assert r.response_ids.tolist() == [8, 9, 2] and r.mask.tolist() == [1, 0, 1]
        assert np.isnan(r.log_probs).all()
    short = Sampling(1.0, 0, 1.0, max_new_tokens=2, stop_ids=(2,), seed=3)
    (cut,) = worker.generate(PROMPTS[:1], short, n=1, lam=0.0)[0]
    assert (cut.response_ids.tolist(), cut.mask.tolist(), cut.finish) == ([8, 9], [1, 0], "length")
    with pytest.raises(ValueError, match="has no dataset response"):
        worker.generate([Prompt("x#0", (1,), "")], SAMPLING, n=1, lam=0.0)


def test_registries_are_what_the_config_offers():
    assert set(ENGINES) == set(get_args(get_type_hints(RolloutConfig)["engine"]))
    of_sequences = {"policy_gradient", "preference"}  # these name their metrics themselves
    assert set(LOSS_NAMES) | of_sequences == set(get_args(get_type_hints(AlgoConfig)["name"]))
    assert set(BUILT_INS) == set(BUILT_IN)
