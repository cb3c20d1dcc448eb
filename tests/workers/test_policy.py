"""The policy-gradient update: against a naive loss in float64, however it is cut, and what it refuses."""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from transformers import AutoModelForCausalLM

from miniverl.algos import advantages, aggregate, kl, policy_losses
from miniverl.algos.chunked import log_probs_and_entropy
from miniverl.config import AlgoConfig, ConfigError, LoraConfig, RolloutConfig
from miniverl.config_policy import Advantage, Aggregation, KlEstimator, PolicyConfig, PolicyLossName
from miniverl.pack import mini_batches, pack
from miniverl.types import Batch, Head, PolicyTargets
from miniverl.workers.actor import Actor, optimizer_steps
from tests.tiny_models import config, ragged_batch, rollout, small_pieces, tiny, write_model

EIGHT = [(5, 9), (2, 6), (3, 6), (7, 2), (1, 7), (7, 1), (2, 8), (6, 3)]
T = 0.7
VOCAB = 30


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    """A model that is float64 throughout: the Llama family's norms compute in float32 for any weights."""
    return write_model(tmp_path_factory.mktemp("student"), tiny("gpt2", seed=1, tied=True))


def actor_of(student: str, policy: PolicyConfig, micro_batch_tokens: int = 4096, **options: Any) -> Actor:
    c = config(
        student,
        dtype="float64",
        algo=AlgoConfig(name="policy_gradient", policy=policy, loss_chunk_tokens=3),
        rollout=RolloutConfig(temperature=T, n=2),
        **options,
    )
    c = small_pieces(c, micro_batch_tokens)
    # one length for every size of micro-batch: an aggregation divides by it
    responses = replace(c.rollout, max_response_length=9)
    c = replace(c, data=replace(c.data, max_prompt_length=5), rollout=responses)
    return Actor(c, VOCAB, "cpu")


def with_targets(student: str, batch: Batch) -> Batch:
    """Advantages at random, old and reference log-probs not far from the student's own: some ratios clip."""
    random = torch.Generator().manual_seed(4)
    a, old, ref = (torch.randn(batch.trained_tokens, generator=random, dtype=torch.float64) for _ in range(3))
    own = torch.cat(actor_of(student, PolicyConfig()).log_probs(batch, T))
    chosen = (torch.rand(batch.trained_tokens, generator=random) < 0.3).double()
    return replace(
        batch, targets=PolicyTargets(a, own + 0.4 * old, own + 0.7 * ref, chosen, 0.5 + chosen, chosen / 9)
    )


def gradient(actor: Actor, batches: list[Batch]) -> dict[str, torch.Tensor]:
    actor.optimizer.adamw.zero_grad()
    for batch in batches:
        actor.backward(batch)
    return {name: p.grad.clone() for name, p in actor.trained.items() if p.grad is not None}


def naive_gradient(student: str, batch: Batch, policy: PolicyConfig) -> dict[str, torch.Tensor]:
    """PPO's clipped loss, weighted, k3 KL, entropy and positive NLL: a sequence at a time, by autograd."""
    model = AutoModelForCausalLM.from_pretrained(
        student, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    targets = batch.targets
    assert isinstance(targets, PolicyTargets) and targets.ref_log_probs_M is not None
    sizes, at = batch.lengths_N.tolist(), 0
    total, nll = torch.zeros(2, dtype=torch.float64)
    for ids, mask in zip(batch.token_ids_S.split(sizes), batch.mask_S.split(sizes), strict=True):
        log_q_TV = (model(ids[None]).logits[0, :-1, :VOCAB] / T).log_softmax(-1)
        for t in torch.nonzero(mask[1:]).flatten().tolist():
            log_prob = log_q_TV[t, ids[t + 1]]
            a, old, ref = (
                float(x[at]) for x in (targets.advantages_M, targets.old_log_probs_M, targets.ref_log_probs_M)
            )
            ratio = torch.exp(log_prob - old)
            clipped = ratio.clamp(1 - policy.clip_low, 1 + policy.clip_high)
            loss = torch.maximum(-a * ratio, -a * clipped)
            if a < 0:
                loss = torch.minimum(loss, torch.tensor(-a * policy.dual_clip, dtype=torch.float64))
            k3 = torch.exp(ref - log_prob) - (ref - log_prob) - 1
            entropy = -(log_q_TV[t].exp() * log_q_TV[t]).sum()
            assert targets.weights_M is not None and targets.nll_weights_M is not None
            total = total + float(targets.weights_M[at]) * loss + policy.kl_coef * k3
            total = total - policy.entropy_coef * entropy
            nll = nll - policy.positive_nll_coef * float(targets.nll_weights_M[at]) * log_prob
            at += 1
    (total / batch.trained_tokens + nll).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_the_update_is_the_naive_loss(student):
    policy = PolicyConfig(kl="k3", kl_coef=0.05, entropy_coef=0.02, clip_high=0.3, positive_nll_coef=0.2)
    batch = with_targets(student, ragged_batch(EIGHT, vocab=VOCAB))
    found = gradient(actor_of(student, policy), [batch])
    expected = naive_gradient(student, batch, policy)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("loss", sorted(policy_losses.LOSSES))
@pytest.mark.parametrize("mode", get_args(Aggregation))
def test_cutting_does_not_change_the_gradient(student, loss, mode):
    policy = PolicyConfig(
        loss=loss, aggregation=mode, kl="low_var_kl", entropy_coef=0.01, positive_nll_coef=0.1
    )
    batch = with_targets(student, ragged_batch(EIGHT, vocab=VOCAB))
    whole = gradient(actor_of(student, policy), [batch])
    assert any(float(g.abs().max()) > 1e-6 for g in whole.values())
    cuts = [
        (actor_of(student, policy, micro_batch_tokens=14), [batch]),
        (actor_of(student, policy), [batch.select([6, 1, 3]), batch.select([0, 2, 4, 5, 7])]),
        (actor_of(student, policy), [batch.select([i]) for i in range(8)]),
    ]
    for actor, parts in cuts:
        for name, g in gradient(actor, parts).items():
            torch.testing.assert_close(g, whole[name], rtol=1e-8, atol=1e-10)


def test_log_probs_and_entropy_are_those_of_plain_autograd():
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(*s, dtype=torch.float64) for s in ((7, 5), (11, 5), (11,)))
    ids, slopes = torch.randint(0, 11, (7,)), torch.randn(2, 7, dtype=torch.float64)
    ways = []
    for chunk in (None, 3):
        h, w, b = (x.clone().requires_grad_() for x in (hidden, weight, bias))
        if chunk is None:
            log_q = ((h @ w.T + b) / T).log_softmax(-1)
            log_probs = log_q.gather(-1, ids[:, None])[:, 0]
            entropy = -(log_q.exp() * log_q).sum(-1)
        else:
            log_probs, entropy = log_probs_and_entropy(h, Head(w, b), ids, temperature=T, chunk_tokens=chunk)
        (log_probs @ slopes[0] + entropy @ slopes[1]).backward()
        ways.append((log_probs, entropy, h.grad, w.grad, b.grad))
    for plain, chunked in zip(*ways, strict=True):
        torch.testing.assert_close(chunked, plain, rtol=1e-10, atol=1e-12)


def test_mini_batches_are_global_batches_of_their_own(student):
    batch = with_targets(student, ragged_batch(EIGHT, vocab=VOCAB))
    parts = mini_batches(batch, 3)
    assert [p.rows for p in parts] == [(0, 1, 2), (3, 4, 5), (6, 7)]
    assert sum(p.trained_tokens for p in parts) == batch.trained_tokens
    assert all(p.trained_tokens == int(p.mask_S.sum()) for p in parts)
    empty = pack([rollout([1, 2], [3], [0]), rollout([1], [4, 5])])
    assert (empty.trained_sequences, mini_batches(empty, 2)[0].trained_sequences) == (1, 0)
    targets = [p.targets for p in parts]
    joined = torch.cat([t.advantages_M for t in targets if isinstance(t, PolicyTargets)])
    assert isinstance(batch.targets, PolicyTargets)
    torch.testing.assert_close(joined, batch.targets.advantages_M)


def test_a_batch_with_nothing_to_train_gives_no_gradient(student):
    batch = pack([rollout([1, 2], [3], [0]), rollout([4, 5], [6], [0])])
    none = replace(batch, targets=PolicyTargets(torch.zeros(0), torch.zeros(0)))
    found = gradient(actor_of(student, PolicyConfig()), [none])
    assert all(bool((g == 0).all()) for g in found.values())


def test_the_base_under_an_adapter_is_the_reference(student, tmp_path):
    llama = write_model(tmp_path, tiny("llama", seed=1))
    actor = actor_of(llama, PolicyConfig(), lora=LoraConfig(rank=4))
    batch = ragged_batch(EIGHT, vocab=VOCAB)
    before = torch.cat(actor.log_probs(batch, T))
    with torch.no_grad():
        for p in actor.trained.values():
            p.add_(0.05)
    after, reference = torch.cat(actor.log_probs(batch, T)), torch.cat(actor.reference_log_probs(batch, T))
    torch.testing.assert_close(reference, before)
    assert float((after - before).abs().max()) > 1e-3
    with pytest.raises(ValueError, match="adapter"):
        actor_of(student, PolicyConfig()).reference_log_probs(batch, T)


def test_the_schedule_counts_optimizer_steps(student):
    assert optimizer_steps(actor_of(student, PolicyConfig(epochs=2, mini_batches=3)).config) == 60


def test_registries_are_what_the_config_offers():
    assert set(get_args(Advantage)) == set(advantages.ESTIMATORS)
    assert set(get_args(PolicyLossName)) == set(policy_losses.LOSSES)
    assert set(get_args(Aggregation)) == set(aggregate.AGGREGATIONS)
    assert set(get_args(KlEstimator)) == set(kl.ESTIMATORS)


@pytest.mark.parametrize(
    ("policy", "n", "names"),
    [
        (PolicyConfig(), 1, ("algo.policy.advantage=grpo", "rollout.n=1", "allow_groups_of_one")),
        (PolicyConfig(advantage="grpo_passk", allow_groups_of_one=True), 1, ("grpo_passk", "rollout.n")),
        (PolicyConfig(kl="k1"), 4, ("algo.policy.kl=k1", "k2")),
        (PolicyConfig(mini_batches=99), 4, ("algo.policy.mini_batches=99", "64 sequences")),
    ],
)
def test_contradictions_are_refused(student, policy, n, names):
    with pytest.raises(ConfigError) as refused:
        config(
            student, algo=AlgoConfig(name="policy_gradient", policy=policy), rollout=RolloutConfig(n=n)
        )
    assert all(name in str(refused.value) for name in names)
