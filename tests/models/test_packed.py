"""Documents in one row compute what they compute alone, and models of which that is not true are refused."""

from dataclasses import replace

import pytest
import torch

from miniverl.config import ConfigError
from miniverl.models.forward import hidden_before_trained
from miniverl.models.packed import check_packable, lay_rows
from miniverl.pack import micro_batches, pack, pack_rows
from tests.tiny_models import FAMILY, VOCAB, loaded, rollout, tiny


def documents(lengths, seed=0):
    """One row per tuple of document lengths."""
    random = torch.Generator().manual_seed(seed)
    rows = []
    for n, row in enumerate(lengths):
        for length in row:
            ids = torch.randint(0, VOCAB, (length,), generator=random).tolist()
            rows.append(replace(rollout(ids[:1], ids[1:]), uid=f"row{n}"))
    return rows


LENGTHS = [(5, 3, 8), (2, 2, 2, 7), (14,), (9, 1, 4)]


def test_rows_by_hand():
    batch = pack_rows(documents([(3, 2), (4,)]))
    a, b, c, d, e, f, g, h, i = batch.token_ids_S.tolist()
    rows = lay_rows(batch)
    assert rows.ids_RL.tolist() == [[a, b, c, d, e], [f, g, h, i, 0]]
    assert rows.positions_RL.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    assert rows.document_RL.tolist() == [[0, 0, 0, 1, 1], [2, 2, 2, 2, -1]]
    assert rows.index_M.tolist() == [0, 1, 3, 5, 6, 7]


@pytest.mark.parametrize("kind", [*FAMILY, "gpt2", "phi"])
def test_packed_is_unpacked(kind):
    """Hidden states and gradients of every weight, against rows of one document each."""
    model = tiny(kind, dtype=torch.float64, seed=3)
    rows = documents(LENGTHS)
    found = []
    for batch in (pack(rows), pack_rows(rows), pack_rows(rows).select(list(reversed(range(len(rows)))))):
        model.zero_grad()
        hidden = hidden_before_trained(model.base_model, batch)
        weights = torch.linspace(-1, 1, hidden.shape[1], dtype=hidden.dtype)
        ((hidden * weights).sin() * batch.token_ids_S[batch.mask_S == 1, None]).sum().backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append((hidden.detach(), gradients, batch))
    alone, packed, turned = found
    torch.testing.assert_close(packed[0], alone[0], rtol=1e-5, atol=1e-5)
    order = [part.tolist() for part in torch.arange(len(alone[0])).split(alone[2].trained_per_row())]
    index = [i for part in reversed(order) for i in part]
    torch.testing.assert_close(turned[0], alone[0][index], rtol=1e-5, atol=1e-5)
    for other in (packed, turned):
        assert other[1].keys() == alone[1].keys()
        for name, gradient in alone[1].items():
            near = 1e-5 * float(gradient.abs().max())
            torch.testing.assert_close(other[1][name], gradient, rtol=1e-5, atol=near)


def test_a_neighbour_that_could_be_seen_would_show():
    """The comparison above is not idle: as one document, the same row gives other states."""
    model = tiny("llama", seed=3)
    (row,) = documents([(16,)])
    parted = documents([(8, 8)])
    whole = hidden_before_trained(model.base_model, pack_rows([row]))
    ids = torch.cat([torch.tensor([*r.prompt_ids, *r.response_ids]) for r in parted])
    assert ids.tolist() == [*row.prompt_ids, *row.response_ids]
    cut = hidden_before_trained(model.base_model, pack_rows(parted))
    torch.testing.assert_close(cut[:7], whole[:7], rtol=1e-4, atol=1e-4)
    assert (cut[7:] - whole[8:]).abs().max() > 0.1


@pytest.mark.parametrize("budget", [16, 32, 40, 64])
def test_a_micro_batch_counts_rows(budget):
    batch = pack_rows(documents(LENGTHS))
    pieces = micro_batches(batch, budget)
    assert sorted(row for piece in pieces for row in piece.rows) == list(range(len(batch)))
    for piece in pieces:
        rows = lay_rows(piece)
        assert rows.ids_RL.numel() <= budget
        assert set(piece.units or ()) == {u for r in piece.rows for u in [(batch.units or ())[r]]}
    assert len(pieces) == {16: 4, 32: 2, 40: 2, 64: 1}[budget]
    with pytest.raises(ValueError, match="a row of 16 tokens exceeds"):
        micro_batches(batch, 15)


def test_a_first_token_cannot_be_trained():
    with pytest.raises(ValueError, match="first token cannot be trained"):
        lay_rows(pack_rows([rollout([], [3, 4])]))


def test_a_window_shorter_than_a_row_is_refused():
    model = loaded(tiny("windowed"))
    check_packable("student", "x", model, 4)
    with pytest.raises(ConfigError, match=r"last 4 tokens only.*data\.row_tokens=4 or less"):
        check_packable("student", "x", model, 5)


@pytest.mark.parametrize("kind", [*FAMILY, "gpt2", "phi"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_attention_is_packable(kind, dtype):
    check_packable("student", "x", loaded(tiny(kind, dtype=dtype)), 32)


def test_a_model_that_carries_state_is_refused():
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    shape = MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, state_size=4)
    with pytest.raises(ConfigError, match="cannot be pre-trained on packed rows"):
        check_packable("student", "x", loaded(MambaForCausalLM(shape)), 32)
