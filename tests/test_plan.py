"""The memory plan: hand-computed parts, refusals with numbers, and the estimate against a measured run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from miniverl.config import (
    Config,
    ConfigError,
    LoraConfig,
    ModelConfig,
    ModelsConfig,
    PlacementConfig,
    RolloutConfig,
)
from miniverl.controller.memory_estimate import Line, Shape, total
from miniverl.controller.plan import GIB, make_plan
from miniverl.main import compose
from miniverl.models.locate import read_config

ROOT = Path(__file__).parent.parent


def shape(name: str) -> Shape:
    config = read_config(name)
    assert config is not None
    return Shape.of(config)


@pytest.mark.parametrize(("name", "parameters"), [
    ("Qwen/Qwen3-0.6B", 596_049_920), ("Qwen/Qwen3-1.7B", 1_720_574_976),
])
def test_parameters_are_the_published_ones(name: str, parameters: int) -> None:
    """The numbers that the models' safetensors headers state."""
    assert shape(name).parameters == parameters


@pytest.mark.parametrize("name", ["teacher", "student-low-data"])
def test_parameters_are_those_of_the_real_module(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from miniverl.models.locate import EMBEDDED

    module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(EMBEDDED / name))
    assert shape(f"embedded:{name}").parameters == sum(p.numel() for p in module.parameters())


def test_parts_by_hand() -> None:
    """Qwen3-0.6B: 2 (K, V) x 28 layers x 8 heads x 128 x 2 bytes = 114,688 bytes of cache per token."""
    s, half = shape("Qwen/Qwen3-0.6B"), ModelConfig(dtype="bfloat16")
    assert s.cache_per_token(half) == 114_688
    assert s.weights(half) == 596_049_920 * 2
    # LoRA r on a linear map a -> b adds r (a + b): per layer q 1024+2048, k and v 1024+1024, o 2048+1024, and
    # gate, up, down 1024+3072 each.
    per_layer = (3072 + 2 * 2048 + 3072 + 3 * 4096) * 8
    assert s.adapter_parameters(LoraConfig(rank=8)) == 28 * per_layer
    linear = 28 * (1024 * 2048 * 2 + 2 * 1024 * 1024 + 3 * 1024 * 3072)
    nf4 = s.weights(ModelConfig(dtype="bfloat16", quantization="nf4"))
    assert nf4 == pytest.approx(linear * 0.516 + (596_049_920 - linear) * 2, rel=1e-3)


def test_recipe_fits_its_card_and_needs_no_gpu_to_be_planned() -> None:
    plan = make_plan(compose(["+experiment=gkd_4080", "plan_only=true"]))
    assert plan.budget == 16 * GIB
    assert 4 * GIB < plan.estimate < 16 * GIB
    for part in ("student weights", "gradients", "optimizer", "KV cache", "activations", "logits chunk",
                 "teacher weights", "total at the worst"):
        assert part in plan.table()
    if not torch.cuda.is_available():
        assert "would not run here" in plan.table() and "model=demo placement=local" in plan.table()
        with pytest.raises(ConfigError, match="CUDA GPU"):
            plan.refuse_if_infeasible()


def test_a_plan_over_budget_is_refused_with_numbers_and_a_way_out() -> None:
    with pytest.raises(ConfigError, match=r"budget is 2\.00 GiB") as refusal:
        make_plan(compose(["+experiment=gkd_4080", "placement.memory_gib=2"]))
    assert "The largest part is" in str(refusal.value) and "lower" in str(refusal.value)


def test_more_positions_than_the_model_has_are_refused() -> None:
    """ENG-07: prompt + response above the model's positions."""
    with pytest.raises(ConfigError, match="2048 positions"):
        make_plan(compose(["+experiment=gkd_quick", "rollout.max_response_length=2040"]))


def test_a_checkpointed_plan_takes_less() -> None:
    models = ModelsConfig(ModelConfig(path="Qwen/Qwen3-0.6B"), ModelConfig(path="Qwen/Qwen3-1.7B"))
    base = Config(model=models,
                  rollout=RolloutConfig(max_batch_rows=8), placement=PlacementConfig(device="cpu"))
    saving = replace(base, model=replace(base.model, student=replace(base.model.student,
                                                                     gradient_checkpointing=True)))
    assert make_plan(saving).estimate < 0.8 * make_plan(base).estimate


def test_an_offline_teacher_and_the_student_are_never_there_together() -> None:
    online = make_plan(compose(["+experiment=gkd_4080", "algo=gkd", "algo.teacher_top_k=32"]))
    offline = make_plan(compose(["+experiment=gkd_4080", "algo=kd", "rollout.n=1"]))
    phases = {line.what: line.when for line in offline.lines if line.what.startswith("teacher")}
    assert set(phases.values()) == {"prepare"}
    teacher = sum(line.size for line in offline.lines if line.when == "prepare")
    student = total([line for line in offline.lines if line.when != "prepare"])
    assert offline.estimate == max(teacher, student) < online.estimate
    heavy = replace(offline, lines=(*offline.lines, Line("teacher weights", 10 * student, "prepare")))
    assert heavy.estimate == teacher + 10 * student


def test_a_preference_plan_holds_a_reference_where_the_loss_has_one() -> None:
    def roles(*more: str) -> tuple[str, ...]:
        return make_plan(compose(["+experiment=gkd_demo", *more])).roles

    assert roles("algo=dpo") == roles("algo=kto") == ("actor", "rollout", "reference")
    assert roles("algo=simpo") == roles("algo=orpo") == ("actor", "rollout")
    assert roles("algo=dpo", "model.student.lora.rank=4") == ("actor", "rollout")


def test_a_row_longer_than_the_models_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.row_tokens=4096.*2048 positions"):
        make_plan(compose(["+experiment=gkd_demo", "algo=pretrain", "data.row_tokens=4096"]))


VOCABULARY = 50_304


@pytest.fixture(scope="module")
def large_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 32 M student and a 49 M teacher with a vocabulary of 50,304, random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from miniverl.data.demo_tokenizer import build

    directory = tmp_path_factory.mktemp("pair")
    tokenizer = build()
    tokenizer.add_tokens([f"filler{i}" for i in range(VOCABULARY - len(tokenizer))])
    for name, hidden, inner in (("student", 384, 1024), ("teacher", 512, 1408)):
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=8, num_attention_heads=hidden // 64,
            num_key_value_heads=hidden // 128, head_dim=64, intermediate_size=inner, tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id)  # pyright: ignore[reportArgumentType]
        Qwen3ForCausalLM(config).save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    return directory


@pytest.mark.parametrize("overrides", [
    pytest.param(["trainer.micro_batch_tokens=512", "algo.loss_chunk_tokens=256"], id="full"),
    pytest.param(["trainer.micro_batch_tokens=1024", "algo.loss_chunk_tokens=128",
                  "model.student.lora.rank=8"], id="adapter"),
    pytest.param(["algo=dpo", "data.addition.digits=[1,3]", "trainer.micro_batch_tokens=1024",
                  "algo.loss_chunk_tokens=128"], id="dpo"),
    pytest.param(["algo=pretrain", "data.row_tokens=512", "trainer.micro_batch_tokens=1024",
                  "algo.loss_chunk_tokens=128"], id="pretrain"),
    pytest.param(["algo=kd", "trainer.micro_batch_tokens=512", "algo.loss_chunk_tokens=128"], id="kd"),
])
def test_estimate_is_within_15_percent_of_the_measured_peak(large_pair: Path, tmp_path: Path,
                                                            overrides: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "miniverl.main", "+experiment=gkd_quick", f"trainer.run_dir={tmp_path}",
         f"model.student.path={large_pair / 'student'}", f"model.teacher.path={large_pair / 'teacher'}",
         "trainer.steps=2", "trainer.prompts_per_step=16", "rollout.ignore_eos=true", "eval.size=1",
         "eval.every=0", "rollout.max_response_length=48", "trainer.export=false", "trainer.report=false",
         "trainer.sinks=[jsonl]", f"algo.cache_dir={tmp_path / 'targets'}", *overrides],
        cwd=ROOT, capture_output=True, text=True, timeout=400, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    memory = json.loads((tmp_path / "result.json").read_text())["memory"]
    estimated, measured = memory["estimate"]["total"], memory["measured"]["total"]
    print(f"estimated {estimated / GIB:.3f} GiB, measured {measured / GIB:.3f} GiB")
    assert estimated == pytest.approx(measured, rel=0.15)
