"""The digest of a model's state, and the one place that pads."""

import hashlib

import pytest
import torch

from miniverl.models.digest import digest, module_digest
from miniverl.models.forward import hidden_before_trained, pad, trained_token_ids
from miniverl.pack import pack
from tests.tiny_models import KINDS, ragged_batch, rollout, tiny


def test_the_digest_by_hand():
    one = b"w|torch.float32|(2,)|" + hashlib.sha256(b"\0\0\x80\x3f\0\0\0\x40").digest()
    expected = hashlib.sha256(hashlib.sha256(one).digest()).hexdigest()
    assert digest([("w", torch.tensor([1.0, 2.0]))]) == expected


def test_the_digest_knows_names_types_shapes_and_bytes_but_no_order():
    tensors = [("a", torch.arange(6.0)), ("b", torch.ones(2, 3).bfloat16()), ("c", torch.zeros(0))]
    base = digest(tensors)
    assert digest(reversed(tensors)) == base
    changes = [
        [("x", torch.arange(6.0)), *tensors[1:]],
        [("a", torch.arange(6.0).double()), *tensors[1:]],
        [("a", torch.arange(6.0).reshape(2, 3)), *tensors[1:]],
        [("a", torch.arange(6.0).neg()), *tensors[1:]],
        [("b", torch.arange(6.0)), ("a", torch.ones(2, 3).bfloat16()), tensors[2]],
        tensors[:2],
    ]
    assert len({base, *(digest(c) for c in changes)}) == 7
    # Lying differently in memory is the same tensor.
    turned = torch.arange(6.0).reshape(2, 3).T.contiguous().T
    assert digest([("a", turned)]) == digest([("a", torch.arange(6.0).reshape(2, 3))])


def test_a_modules_digest_covers_persistent_buffers_and_tied_weights():
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.ones(2))
    module.register_buffer("mean", torch.zeros(2))
    before = module_digest(module), module_digest(module, trainable_only=True)
    module.get_buffer("mean").add_(1)
    assert module_digest(module) != before[0]
    assert module_digest(module, trainable_only=True) == before[1]
    tied = tiny("qwen2", tied=True)
    before_tied = module_digest(tied)
    with torch.no_grad():
        tied.get_output_embeddings().weight[0, 0] += 1  # type: ignore[index, operator]
    assert module_digest(tied) != before_tied


def test_padding_by_hand():
    batch = pack([rollout([5, 6], [7, 8, 9], [1, 0, 1]), rollout([3], [4])])
    ids_NL, index_M = pad(batch)
    assert ids_NL.tolist() == [[5, 6, 7, 8, 9], [3, 4, 0, 0, 0]]
    assert index_M.tolist() == [1, 3, 5]  # before 7, before 9, before 4
    assert trained_token_ids(batch).tolist() == [7, 9, 4]


def test_a_trained_first_token_is_refused():
    with pytest.raises(ValueError, match="first token cannot be trained"):
        pad(pack([rollout([1], [2]), rollout([], [3, 4])]))


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_are_those_of_each_sequence_alone(kind):
    model = tiny(kind)
    batch = ragged_batch([(5, 4), (1, 1), (2, 7), (3, 0)])
    with torch.no_grad():
        got = hidden_before_trained(model.base_model, batch)
        sizes, parts = batch.lengths_N.tolist(), []
        for ids, mask in zip(batch.token_ids_S.split(sizes), batch.mask_S.split(sizes), strict=True):
            hidden = model.base_model(input_ids=ids[None]).last_hidden_state[0]
            parts.append(hidden[:-1][mask[1:] == 1])
    torch.testing.assert_close(got, torch.cat(parts), rtol=1e-4, atol=1e-5)
