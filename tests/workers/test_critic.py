"""The critic and the process reward model: against naive losses, however they are cut, and kept exactly."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from miniverl.algos.value import explained_variance
from miniverl.config import AlgoConfig, Config, OptimConfig, RolloutConfig
from miniverl.config_policy import CriticConfig, PolicyConfig, ProcessRewardConfig
from miniverl.metrics import finalize
from miniverl.types import Batch, OutcomeTargets, ValueTargets
from miniverl.workers.critic import Critic
from miniverl.workers.process_reward import ProcessReward
from tests.tiny_models import config, ragged_batch, small_pieces, tiny, write_model

EIGHT = [(5, 9), (2, 6), (3, 6), (7, 2), (1, 7), (7, 1), (2, 8), (6, 3)]
VOCAB = 30


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("student"), tiny("gpt2", seed=1, tied=True))


def config_of(student: str, micro_batch_tokens: int = 4096, temperature: float = 0.7) -> Config:
    policy = PolicyConfig(
        advantage="gae", critic=CriticConfig(lr=0.01, clip=0.3), prime=ProcessRewardConfig(lr=0.01, beta=0.5)
    )
    c = config(
        student,
        dtype="float64",
        algo=AlgoConfig(name="policy_gradient", policy=policy, loss_chunk_tokens=3),
        rollout=RolloutConfig(temperature=temperature),
        optim=OptimConfig(lr=0.5, schedule="cosine"),
    )
    return small_pieces(c, micro_batch_tokens)


def critic_of(c: Config) -> Critic:
    """With a head that is not 0: a fresh one values everything alike."""
    critic = Critic(c, VOCAB, "cpu")
    critic.value_head.double()
    torch.manual_seed(3)
    with torch.no_grad():
        critic.value_head.weight.normal_(0, 0.3)
        critic.value_head.bias.fill_(0.1)
    critic.trained |= {f"value_head.{n}": p for n, p in critic.value_head.named_parameters()}
    critic.optimizer = type(critic.optimizer)("critic", critic.trained, c.optim, 0.01, 10)
    return critic


def with_returns(critic: Critic, batch: Batch) -> Batch:
    random = torch.Generator().manual_seed(4)
    noise, returns = (torch.randn(batch.trained_tokens, generator=random).double() for _ in range(2))
    old = torch.cat(critic.values(batch)) + 0.4 * noise
    return replace(batch, targets=ValueTargets(returns, old))


def naive(critic: Critic, student: str, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(
        student, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    weight, bias = (p.detach().clone().requires_grad_() for p in critic.value_head.parameters())
    assert isinstance(batch.targets, ValueTargets)
    sizes, at, total = batch.lengths_N.tolist(), 0, torch.zeros((), dtype=torch.float64)
    values = []
    for ids, mask in zip(batch.token_ids_S.split(sizes), batch.mask_S.split(sizes), strict=True):
        hidden = model.base_model(ids[None]).last_hidden_state[0]
        for t in torch.nonzero(mask).flatten().tolist():
            value = hidden[t - 1] @ weight[0] + bias[0]
            old, goal = batch.targets.old_values_M[at], batch.targets.returns_M[at]
            bounded = torch.clamp(value, old - 0.3, old + 0.3)
            total = total + 0.5 * torch.maximum((value - goal) ** 2, (bounded - goal) ** 2)
            values.append(value.detach())
            at += 1
    (total / batch.trained_tokens).backward()
    grads = {name: p.grad for name, p in model.base_model.named_parameters() if p.grad is not None}
    assert weight.grad is not None and bias.grad is not None
    return torch.stack(values), {**grads, "value_head.weight": weight.grad, "value_head.bias": bias.grad}


def test_values_and_their_loss_are_the_naive_ones_and_know_no_temperature(student):
    """LOS-06: a value head at T = 0.7 gives what it gives at 1."""
    critic, batch = critic_of(config_of(student)), ragged_batch(EIGHT, vocab=VOCAB)
    batch = with_returns(critic, batch)
    values, expected = naive(critic, student, batch)
    torch.testing.assert_close(torch.cat(critic.values(batch)), values, rtol=1e-9, atol=1e-10)
    warm = critic_of(config_of(student, temperature=1.0))
    assert torch.equal(torch.cat(warm.values(batch)), torch.cat(critic.values(batch)))
    critic.backward(batch)
    for name, gradient in expected.items():
        found = critic.trained[name].grad
        assert found is not None
        torch.testing.assert_close(found, gradient, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("cut", ["micro", "shards"])
def test_cutting_does_not_change_the_critics_gradient(student, cut):
    whole, batch = critic_of(config_of(student)), ragged_batch(EIGHT, vocab=VOCAB)
    batch = with_returns(whole, batch)
    whole.backward(batch)
    other = critic_of(config_of(student, 16 if cut == "micro" else 4096))
    parts = [batch] if cut == "micro" else [batch.select([6, 1, 3]), batch.select([0, 2, 4, 5, 7])]
    for part in parts:
        other.backward(part)
    for name, p in whole.trained.items():
        if p.grad is not None:
            torch.testing.assert_close(other.trained[name].grad, p.grad, rtol=1e-8, atol=1e-10)


def test_a_fresh_critic_values_everything_at_0_and_learns(student):
    critic, batch = Critic(config_of(student), VOCAB, "cpu"), ragged_batch(EIGHT, vocab=VOCAB)
    assert not torch.cat(critic.values(batch)).any()
    returns = torch.cat([torch.full((n,), float(n > 4)) for n in batch.trained_per_row()])
    for _ in range(40):
        targets = ValueTargets(returns, torch.cat(critic.values(batch)))
        critic.update(replace(batch, targets=targets))
    explained = explained_variance(torch.cat(critic.values(batch)).float(), returns)
    assert explained is not None and explained > 0.8


def test_the_critic_goes_on_bit_for_bit(student, tmp_path):
    critic, batch = Critic(config_of(student), VOCAB, "cpu"), ragged_batch(EIGHT, vocab=VOCAB)
    batch = with_returns(critic, batch)
    critic.update(batch)
    critic.save(str(tmp_path))
    again = Critic(config_of(student), VOCAB, "cpu")
    again.load(str(tmp_path))
    assert again.digest() == critic.digest()
    assert again.update(batch) == critic.update(batch) and again.digest() == critic.digest()


def test_explained_variance():
    returns = torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(torch.full((4,), 0.5), returns) == 0
    assert explained_variance(returns, torch.ones(4)) is None


def test_the_process_reward_model_learns_outcomes_however_it_is_cut(student, tmp_path):
    batch = ragged_batch(EIGHT, vocab=VOCAB)
    models = [ProcessReward(config_of(student, size), VOCAB, "cpu") for size in (4096, 16)]
    reference = torch.cat(models[0].log_probs(batch, 0.7))
    right = [float(i % 2) for i in range(8)]
    outcomes = torch.cat(
        [torch.full((n,), r) for n, r in zip(batch.trained_per_row(), right, strict=True)]
    )
    batch = replace(batch, targets=OutcomeTargets(reference, outcomes))
    first, _ = (finalize(model.update(batch)) for model in models)
    assert first["process_reward/loss"] == pytest.approx(0.6931472, abs=1e-6)  # log 2: it starts undecided
    for name, p in models[0].trained.items():
        torch.testing.assert_close(models[1].trained[name], p, rtol=1e-6, atol=1e-9)
    accuracies = [finalize(models[0].update(batch))["process_reward/accuracy"] for _ in range(30)]
    assert accuracies[-1] == 1
    models[0].save(str(tmp_path))
    models[1].load(str(tmp_path))
    assert all(torch.equal(models[1].trained[name], p) for name, p in models[0].trained.items())
