"""The weight identity that a shared engine reports after a sync."""

import torch

from miniverl.workers.actor import Actor
from miniverl.workers.rollout.base import Request, Sampling
from miniverl.workers.rollout.worker import RolloutWorker
from miniverl.workers.transfer import SharedModule, storage_identity
from tests.tiny_models import config, loaded, ragged_batch, tiny, write_model


def test_the_identity_changes_with_every_write_and_with_nothing_else(tmp_path):
    actor = Actor(config(write_model(tmp_path, tiny("qwen2", tied=True))), 32, "cpu")
    worker = RolloutWorker(config(str(tmp_path)), actor)
    seen = [worker.sync(0)]
    assert seen[0] == actor.identity()
    batch = ragged_batch([(3, 4), (2, 2)])
    worker.engine.generate([Request("a", (1, 2))], Sampling(1.0, 0, 1.0, 4, (), 0))
    actor.log_probs(batch, 1.0)
    actor.backward(batch)
    actor.optimizer.adamw.zero_grad()
    assert worker.sync(0) == seen[0]
    for _ in range(2):
        actor.update(batch)
        assert actor.identity() not in seen
        seen.append(worker.sync(len(seen)))
        assert seen[-1] == actor.identity()
    assert worker.weights.version == 2
    with torch.no_grad():
        next(iter(actor.trained.values())).mul_(1.0)
    assert worker.sync(3) not in seen


def test_equal_weights_elsewhere_are_not_the_same_storage():
    a, b = tiny("llama"), tiny("llama")
    assert SharedModule(loaded(a)).receive(0) == storage_identity(a) != storage_identity(b)


def test_a_buffer_that_changed_shows():
    model = tiny("llama")
    before = storage_identity(model)
    next(model.buffers()).mul_(2.0)
    assert storage_identity(model) != before
