"""AdamW's moments on disk, and the learning rate's course by hand."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from miniverl.config import OptimConfig
from miniverl.workers.optimizer import lr_factor
from miniverl.workers.optimizer_state import load_optimizer, save_optimizer


def trained(seed=0):
    torch.manual_seed(seed)
    parameters = {"a.weight": torch.nn.Parameter(torch.randn(3, 2)), "b": torch.nn.Parameter(torch.randn(4))}
    return parameters, torch.optim.AdamW(parameters.values(), lr=0.1, weight_decay=0.01, fused=True)


def step(parameters, optimizer, seed):
    torch.manual_seed(seed)
    for p in parameters.values():
        p.grad = torch.randn_like(p)
    optimizer.step()


def test_training_goes_on_bit_for_bit_after_a_round_trip(tmp_path):
    parameters, optimizer = trained()
    for seed in range(3):
        step(parameters, optimizer, seed)
    save_optimizer(optimizer, parameters, tmp_path / "o.safetensors")
    again, other = trained(seed=9)
    step(again, other, 5)  # state that must not survive
    with torch.no_grad():
        for name, p in parameters.items():
            again[name].copy_(p)
    load_optimizer(other, again, tmp_path / "o.safetensors")
    for seed in (7, 8):
        step(parameters, optimizer, seed)
        step(again, other, seed)
    for name, p in parameters.items():
        assert torch.equal(p, again[name])
    saved = load_file(tmp_path / "o.safetensors")
    assert set(saved) == {f"{m}/{n}" for m in ("exp_avg", "exp_avg_sq", "step") for n in parameters}
    assert saved["step/b"].item() == 3


def test_before_the_first_step_there_is_nothing_to_restore(tmp_path):
    parameters, optimizer = trained()
    save_optimizer(optimizer, parameters, tmp_path / "o.safetensors")
    step(parameters, optimizer, 0)
    load_optimizer(optimizer, parameters, tmp_path / "o.safetensors")
    assert len(optimizer.state) == 0


@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_a_state_of_other_parameters_is_refused(tmp_path, change):
    parameters, optimizer = trained()
    step(parameters, optimizer, 0)
    path = tmp_path / "o.safetensors"
    save_optimizer(optimizer, parameters, path)
    tensors = load_file(path)
    if change == "missing":
        del tensors["exp_avg_sq/b"]
    else:
        tensors["exp_avg/c"] = torch.zeros(1)
    save_file(tensors, path)
    with pytest.raises(ValueError, match="does not belong to these parameters"):
        load_optimizer(optimizer, parameters, path)


def test_constant_after_warm_up():
    optim = OptimConfig(warmup_steps=4)
    assert [lr_factor(s, optim, 10) for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert lr_factor(0, OptimConfig(), 10) == 1.0


def test_linear_and_cosine_end_at_their_floor():
    linear = OptimConfig(schedule="linear", warmup_steps=2, min_lr_ratio=0.2)
    assert [lr_factor(s, linear, 7) for s in range(7)] == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4, 0.2])
    cosine = OptimConfig(schedule="cosine", min_lr_ratio=0.1)
    half = 0.1 + 0.9 * 0.5
    assert [lr_factor(s, cosine, 5) for s in (0, 2, 4)] == pytest.approx([1.0, half, 0.1])
    assert lr_factor(1, cosine, 5) == pytest.approx(0.1 + 0.9 * (2 + 2**0.5) / 4)  # cos 45° = √2/2
    assert lr_factor(99, linear, 7) == pytest.approx(0.2)


def test_a_run_of_warm_up_only_and_one_of_a_single_step():
    warming = OptimConfig(schedule="cosine", warmup_steps=3)
    assert [lr_factor(s, warming, 3) for s in range(3)] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert lr_factor(0, OptimConfig(schedule="linear"), 1) == 1.0
