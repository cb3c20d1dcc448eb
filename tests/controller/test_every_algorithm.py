"""Each file of conf/algo/ starts on the demo and takes a step, or is refused with what to change."""

from pathlib import Path

import pytest

import miniverl.conf
from miniverl.config import ConfigError
from miniverl.controller.build import run
from miniverl.controller.plan import make_plan
from miniverl.main import compose
from miniverl.metrics import read_metrics

NAMES = sorted(path.stem for path in (Path(miniverl.conf.__path__[0]) / "algo").glob("*.yaml"))
SMALL = [
    "placement=local",
    "data.addition.digits=[1,2]",
    "trainer.steps=1",
    "trainer.prompts_per_step=4",
    "rollout.max_response_length=32",
    "eval.size=4",
    "eval.every=0",
    "optim.warmup_steps=0",
    "trainer.report=false",
    "trainer.export=false",
    "trainer.sinks=[jsonl]",
]


@pytest.mark.parametrize("name", NAMES)
def test_it_starts_or_says_what_to_change(name, tmp_path):
    more = [f"trainer.run_dir={tmp_path}"]
    try:
        compose(["+experiment=gkd_demo", f"algo={name}"])
    except ConfigError as refused:
        assert "rollout.n=4" in str(refused)
        more.append("rollout.n=4")
    if name in ("ppo", "vapo"):
        more.append("algo.policy.critic.warmup_steps=0")
    if name == "dapo":
        more.append("algo.policy.max_gen_batches=60")
    c = compose(["+experiment=gkd_demo", f"algo={name}", *SMALL, *more])
    result = run(c, make_plan(c))
    assert result["finished"] and result["steps"] == 1
    (step,) = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "actor/lr" in row]
    assert step["actor/skipped_updates"] == 0 and "actor/grad_norm" in step
