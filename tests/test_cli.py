"""The command line as typed: what it prints, its exit status, and that a refusal starts nothing."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from miniverl.config import ConfigError
from miniverl.main import compose, main, options

ROOT = Path(__file__).parents[1]
QUICK = "+experiment=gkd_quick"


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "miniverl.main", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def refused(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(arguments)
    text = str(caught.value)
    assert "\n" not in text, "an error is one paragraph"
    return text


def test_help_is_quick_and_complete() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = cli("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0
    assert done.stderr == ""
    for words in ("+experiment=NAME", "demo_no_carry", "one_gpu", "prompts_per_step", *options("experiment")):
        assert words in done.stdout
    # CPU seconds, because the clock on the wall also counts whoever shares the cores.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys; from miniverl.main import main; main(['--help']);"
        "sys.exit(str(sorted({'torch', 'ray', 'hydra', 'transformers', 'numpy'} & set(sys.modules))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stderr == "[]\n"


@pytest.mark.parametrize("arguments", [[], ["trainer.steps=5"], ["model=demo", "trainer.stepz=5"]])
def test_without_an_experiment_they_are_listed(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.err == ""
    for name in options("experiment"):
        assert re.search(rf"{name}\b.+\w.+\w", shown.out), "name, what it does, what it wants"


def test_a_refusal_is_one_paragraph_and_starts_nothing(tmp_path: Path) -> None:
    script = (
        "import sys; from miniverl.main import main; code = main(sys.argv[1:]);"
        "print(code, sorted({'torch', 'ray', 'miniverl.controller'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, QUICK, "trainer.stepz=5"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "2 []\n"
    assert done.stderr == (
        "miniverl: trainer.stepz=5: there is no key trainer.stepz. The nearest is "
        "trainer.steps, "
        "which takes a whole number above 0.\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_exit_status_of_the_process() -> None:
    done = cli(QUICK, "algo.beta=2")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "miniverl: algo.beta=2.0 must lie between 0 and 1.\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["+experiment=gkd_demoo"],
            "experiment=gkd_demoo: there is no such experiment. The nearest is gkd_demo;",
        ),
        (["experiment=gkd_demo"], "an experiment is chosen with +experiment=NAME"),
        (["++experiment=gkd_demo"], "an experiment is chosen with +experiment=NAME"),
        (["~experiment"], "an experiment is chosen with +experiment=NAME"),
        ([QUICK, "+experiment=gkd_demo"], "+experiment=gkd_quick is chosen already"),
        ([QUICK, "model=dema"], "model=dema: there is no such model. The nearest is demo;"),
        ([QUICK, "model=null"], "model=null: there is no such model"),
        ([QUICK, "placement=two_gpus"], "placement=two_gpus: there is no such placement"),
        ([QUICK, "+placement=local"], "placement exists already; write placement=local."),
        ([QUICK, "+trainer.steps=5"], "trainer.steps exists already; write trainer.steps=5."),
        ([QUICK, "++trainer.steps=5"], "trainer.steps exists already; write trainer.steps=5."),
        ([QUICK, "~trainer.steps"], "~trainer.steps: a setting cannot be taken away, only changed"),
        ([QUICK, "~extra.note"], "~extra.note: there is no such entry to drop"),
        ([QUICK, "trainer.steps=1,2"], "asks for several runs"),
        ([QUICK, "trainer.steps=???"], "trainer.steps=??? stands for a value that you must give"),
        ([QUICK, "trainer.steps=${trainer.stepz}"], "Interpolation key 'trainer.stepz' not found"),
        ([QUICK, "model@other=demo"], "`@` places nothing here"),
        ([QUICK, "data.train_files=[a"], "data.train_files=[a: cannot be read as key=value"),
        ([QUICK, "--steps"], "--steps: there is no such option"),
        ([QUICK, "gkd_demo"], "Did you mean +experiment=gkd_demo?"),
        ([QUICK, "trainer.steps"], "trainer.steps: settings are written key=value"),
        ([QUICK, "hydra.run.dir=x"], "there is no key hydra.run.dir"),
        ([QUICK, "trainer.steps=abc"], 'trainer.steps="abc" is not a whole number above 0'),
        ([QUICK, "trainer.steps=1.5"], "trainer.steps=1.5 is not a whole number above 0"),
        ([QUICK, "rollout.top_p=nan"], "rollout.top_p=nan is not a finite number"),
        ([QUICK, "placement.kind=two_gpus"], "is not one of local | one_gpu. The nearest is one_gpu."),
    ],
)
def test_bad_requests(arguments: list[str], words: str) -> None:
    assert words in refused(*arguments)


def test_choices_on_the_command_line_win_over_the_experiment() -> None:
    config = compose(["+experiment=gkd_demo", "model=demo_no_carry", "placement=local", "algo=sft"])
    assert config.model.student.path == "embedded:student-no-carry"
    assert config.placement.kind == "local"
    assert config.algo.name == "sft"
    # In any order, and a setting wins over a group.
    config = compose(["placement.kind=local", "placement=one_gpu", "+experiment=gkd_demo"])
    assert config.placement.kind == "local"


def test_later_setting_wins() -> None:
    assert compose([QUICK, "trainer.steps=5", "trainer.steps=6"]).trainer.steps == 6


def test_section_that_is_off_is_turned_on_by_a_key_of_it_and_off_by_null() -> None:
    assert compose([QUICK]).model.student.lora is None
    lora = compose([QUICK, "model.student.lora.rank=8"]).model.student.lora
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.target_modules) == (8, 32.0, "all-linear")
    assert compose([QUICK, "model.student.lora.rank=8", "model.student.lora=null"]).model.student.lora is None
    full = compose(["+experiment=gkd_4080", "model.student.lora=null", "model.student.dtype=float32"])
    assert full.model.student.lora is None
    assert compose(["+experiment=make_demo_teacher", "model.teacher.path=x"]).model.teacher is not None
    run_dir = compose([QUICK, "trainer.run_dir=here"]).trainer.run_dir
    assert run_dir == "here"


def test_a_setting_may_refer_to_another() -> None:
    assert compose([QUICK, "eval.every=${trainer.steps}"]).eval.every == compose([QUICK]).trainer.steps


def test_a_section_may_be_given_as_a_mapping() -> None:
    config = compose([QUICK, "placement={kind: one_gpu, threads: 2}", "~extra.a", "extra={a: 1, b: 2}"])
    assert (config.placement.kind, config.placement.threads, config.extra) == ("one_gpu", 2, {"b": 2})
