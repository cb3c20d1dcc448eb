"""Keys, values and defaults: what is refused, with which words, and what survives a file."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from miniverl.config import Config, ConfigError, DataConfig, ModelConfig, ModelsConfig, TrainerConfig
from miniverl.config_io import KEYS, config_from_dict, config_to_dict, defaults, fingerprint, put
from miniverl.main import CONF, compose, compose_tree, options, read_request

HERE = Path(__file__).parent
TEACHER = {"model": {"teacher": {"path": "somewhere"}}}
VALID = Config(model=ModelsConfig(teacher=ModelConfig(path="somewhere")))


def refusal(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        config_from_dict({**TEACHER, **tree})
    text = str(caught.value)
    assert "\n" not in text, "an error is one paragraph"
    return text


# One source of defaults (DIS-11)


def test_composition_without_choices_is_the_dataclasses_defaults() -> None:
    assert compose_tree(read_request([])) == defaults()


def test_defaults_validate_to_a_config_built_in_code() -> None:
    tree = defaults()
    tree["model"]["teacher"] = {"path": "somewhere"}
    assert config_from_dict(tree) == VALID == config_from_dict(TEACHER)


def test_defaults_are_as_recorded() -> None:
    """A changed default changes everybody's runs: whoever means it updates the record with it."""
    recorded = json.loads((HERE / "config_defaults.json").read_text())
    assert defaults() == recorded


# One temperature, no copied blocks (DIS-13)


def test_temperature_has_one_key_for_the_run() -> None:
    assert {key for key in KEYS if "temperature" in key} == {"rollout.temperature", "eval.temperature"}
    config = compose(["+experiment=gkd_quick", "rollout.temperature=0.7"])
    assert config.rollout.temperature == 0.7
    assert config.eval.temperature == 0


def test_conf_has_no_yaml_anchors() -> None:
    for path in CONF.rglob("*.yaml"):
        assert not re.search(r"(^|\s)[&*]\w+", re.sub(r"#.*", "", path.read_text())), path


# Unknown keys (CFG-01)

UNKNOWN = {
    # a typo per section
    "sumary": "summary",
    "model.studnet": "model.student",
    "model.student.pth": "model.student.path",
    "model.student.lora.rnak": "model.student.lora.rank",
    "model.teacher.quantisation": "model.teacher.quantization",
    "data.max_prompt_lenght": "data.max_prompt_length",
    "data.addition.digit": "data.addition.digits",
    "rollout.temprature": "rollout.temperature",
    "algo.divergance": "algo.divergence",
    "optim.learning_rate": "optim.min_lr_ratio",
    "eval.evry": "eval.every",
    "trainer.stepz": "trainer.steps",
    "placement.dashbord": "placement.dashboard",
    # a key of another trainer per section
    "actor_rollout_ref.actor.optim.lr": "optim.lr",
    "actor_rollout_ref.rollout.n": "rollout.n",
    "data.train_file": "data.train_files",
    "trainer.resume_mode": "trainer.resume",
    "trainer.default_local_dir": "trainer.run_dir",
    "rollout.response_length": "rollout.max_response_length",
    # the last part alone
    "lr": "optim.lr",
    "steps": "trainer.steps",
}


@pytest.mark.parametrize(("key", "nearest"), UNKNOWN.items())
@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_unknown_key_names_itself_its_value_and_the_nearest(prefix: str, key: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["+experiment=gkd_quick", f"{prefix}{key}=7"])
    text = str(caught.value)
    assert f"{key}=7: there is no key {key}. The nearest is {nearest}, which takes " in text
    assert "+" not in text, "advice to add the key would invite a setting that nothing reads"


@pytest.mark.parametrize("section", [key for key, known in KEYS.items() if known.section])
def test_every_section_refuses_a_new_key_from_a_file(section: str) -> None:
    tree: dict[str, Any] = {}
    node = tree
    for name in section.split("."):
        node = node.setdefault(name, {})
    node["brand_new"] = 1
    with pytest.raises(ConfigError, match=rf"{section}\.brand_new=1: there is no key"):
        config_from_dict(tree)


def test_only_extra_takes_keys_of_ones_own() -> None:
    config = compose(["+experiment=gkd_quick", "+extra.note='a: b'", "extra.more={deep: [1, null]}"])
    assert config.extra == {"note": "a: b", "more": {"deep": [1, None]}}


# Values of the wrong kind

WRONG = [
    ({"trainer": {"steps": "abc"}}, 'trainer.steps="abc" is not a whole number above 0'),
    ({"algo": {"policy": {"lam": 1.5}}}, "algo.policy.lam=1.5 is not a number at least 0 and at most 1"),
    ({"optim": {"max_skipped": 0}}, "optim.max_skipped=0 is not a whole number above 0"),
    ({"algo": {"policy": {"kl_coef": -1}}}, "algo.policy.kl_coef=-1 is not a number at least 0"),
    ({"trainer": {"steps": "8"}}, 'trainer.steps="8" is not a whole number above 0'),
    ({"trainer": {"steps": 1.5}}, "trainer.steps=1.5 is not a whole number above 0"),
    ({"trainer": {"steps": 1.0}}, "trainer.steps=1.0 is not a whole number above 0"),
    ({"trainer": {"steps": 0}}, "trainer.steps=0 is not a whole number above 0"),
    ({"trainer": {"steps": True}}, "trainer.steps=true is not a whole number above 0"),
    ({"trainer": {"steps": None}}, "trainer.steps=null is not a whole number above 0"),
    ({"trainer": {"export": 1}}, "trainer.export=1 is not true or false"),
    ({"trainer": {"export": "true"}}, 'trainer.export="true" is not true or false'),
    ({"trainer": {"run_dir": 2024}}, "trainer.run_dir=2024 is not text or null. Quote it"),
    ({"trainer": {"sinks": ["jsonl", "wandb"]}}, 'trainer.sinks=["jsonl", "wandb"] is not a list'),
    ({"trainer": "local"}, 'trainer="local" is not a section with the keys steps, '),
    ({"rollout": {"top_p": float("nan")}}, "rollout.top_p=nan is not a finite number"),
    ({"rollout": {"temperature": float("inf")}}, "rollout.temperature=inf is not a finite number"),
    ({"rollout": {"stop_ids": 3}}, "rollout.stop_ids=3 is not a list"),
    ({"optim": {"lr": 0}}, "optim.lr=0 is not a number above 0"),
    ({"optim": {"betas": [0.9]}}, "optim.betas=[0.9] is not a list of 2"),
    ({"algo": {"divergence": "reverse-kl"}}, "The nearest is reverse_kl."),
    ({"placement": {"kind": "two_gpus"}}, 'placement.kind="two_gpus" is not one of local | one_gpu'),
    ({"data": {"train_files": "a.parquet"}}, 'data.train_files="a.parquet" is not a list'),
    ({"data": {"chat_template_kwargs": {"a": [1]}}}, 'data.chat_template_kwargs={"a": [1]} is not a mapping'),
    ({"data": {"chat_template_kwargs": "thinking"}}, 'data.chat_template_kwargs="thinking" is not a mapping'),
    ({"model": {"teacher": "demo"}}, 'model.teacher="demo" is not a section with the keys path, '),
    ({"model": None}, "model=null is not a section"),
    ({"extra": {"when": {1, 2}}}, "extra.when={1, 2} is of type set"),
    ({"extra": {"name": "\udc80"}}, "holds bytes that are not UTF-8 text"),
]


@pytest.mark.parametrize(("tree", "words"), WRONG)
def test_wrong_value_is_named_with_what_is_expected(tree: dict[str, Any], words: str) -> None:
    assert words in refusal(tree)


def test_several_faults_are_all_named() -> None:
    text = refusal({"trainer": {"steps": "x", "seed": "y"}, "optim": {"lr": "z"}})
    assert text.startswith('trainer.steps="x"') or text.startswith('optim.lr="z"')
    assert all(key in text for key in ("trainer.steps", "trainer.seed", "optim.lr"))


CONTRADICTIONS = [
    ({"model": {"teacher": None}}, "algo.name=gkd needs a teacher"),
    ({"algo": {"beta": 1.5}}, "algo.beta=1.5 must lie between 0 and 1"),
    ({"algo": {"lam": -0.1}}, "algo.lam=-0.1 must lie between 0 and 1"),
    ({"rollout": {"temperature": 0.0}}, "rollout.temperature=0.0"),
    ({"rollout": {"top_k": 50}}, "rollout.top_k=50"),
    ({"data": {"source": "files"}}, "data.train_files=[…]"),
    ({"data": {"addition": {"digits": [3, 2]}}}, "data.addition.digits=[3, 2]"),
    ({"algo": {"name": "sft"}, "rollout": {"n": 2}}, "use rollout.n=1, not 2"),
    (
        {"model": {"requires_cuda": True, "teacher": {"path": "x"}}, "placement": {"device": "cpu"}},
        "placement.device=cpu contradicts model.requires_cuda=true",
    ),
    ({"model": {"teacher": {"path": "x", "lora": {}}}}, "model.teacher.lora is set"),
    ({"model": {"teacher": {"path": "x"}, "student": {"quantization": "nf4"}}}, "model.student.lora.rank=16"),
]


@pytest.mark.parametrize(("tree", "words"), CONTRADICTIONS)
def test_contradiction_is_named(tree: dict[str, Any], words: str) -> None:
    assert words in refusal(tree)


def test_contradiction_in_code_raises_the_same_error() -> None:
    with pytest.raises(ConfigError, match="needs a teacher"):
        Config()


# Sizes that do not go together are one error before anything loads (CFG-05)


@pytest.mark.parametrize("prompt", [8, 100])
@pytest.mark.parametrize("response", [8, 100])
@pytest.mark.parametrize("budget", [15, 16, 107, 108, 199, 200])
def test_micro_batch_holds_the_longest_sequence_or_is_refused(
    prompt: int, response: int, budget: int
) -> None:
    tree = {
        "data": {"max_prompt_length": prompt},
        "rollout": {"max_response_length": response},
        "trainer": {"micro_batch_tokens": budget},
    }
    if budget >= prompt + response:
        assert config_from_dict({**TEACHER, **tree}).trainer.micro_batch_tokens == budget
    else:
        text = refusal(tree)
        assert f"trainer.micro_batch_tokens={budget} cannot hold" in text
        assert text.endswith(f"raise it to at least {prompt + response}.")


# A file gives back what was put in (CFG-02)

YAML_WORDS = ["null", "None", "1e-5", "true", "[a]", "a: b", "???", "~", "0x10", "1_000", "${trainer.steps}"]
AWKWARD_TEXT = [*YAML_WORDS, "🙂", "", " x ", "\n", "#", "'", '"']
AWKWARD = st.sampled_from([None, 1e-5, True, 1, 1.0, 0.1 + 0.2, -0.0, 2**63, *AWKWARD_TEXT])
SCALARS = (
    AWKWARD | st.text() | st.integers() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False)
)
NOTES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    extra=st.dictionaries(st.text(), NOTES, max_size=4),
    kwargs=st.dictionaries(st.text(), SCALARS, max_size=3),
    run_dir=st.none() | st.sampled_from(AWKWARD_TEXT) | st.text(),
    key=st.text(),
    files=st.lists(st.text(), max_size=3),
)
def test_config_survives_a_json_file(
    extra: dict, kwargs: dict, run_dir: str | None, key: str, files: list
) -> None:
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    config = replace(
        VALID,
        data=DataConfig(
            prompt_key=key, response_key=run_dir, train_files=tuple(files), chat_template_kwargs=kwargs
        ),
        trainer=TrainerConfig(run_dir=run_dir),
        extra=extra,
    )
    text = json.dumps(config_to_dict(config))
    again = config_from_dict(json.loads(text))
    assert again == config
    # Equality alone would let 1, 1.0 and true pass for each other.
    assert json.dumps(config_to_dict(again)) == text


def test_explicit_null_stays_null() -> None:
    config = replace(VALID, eval=replace(VALID.eval, max_response_length=None))
    tree = config_to_dict(config)
    assert tree["eval"]["max_response_length"] is None
    assert tree["model"]["student"]["lora"] is None
    assert config_from_dict(tree) == config


@pytest.mark.parametrize("text", ["None", "null", "1e-5", "true", "[a]", "a: b", "🙂", "a, b", "8", "it's"])
def test_quoted_text_on_the_command_line_stays_text(text: str) -> None:
    quoted = "'" + text.replace("'", "\\'") + "'"
    assert compose(["+experiment=gkd_quick", f"extra.note={quoted}"]).extra == {"note": text}


# A mapping in any of its three writings (CFG-04)


@pytest.mark.parametrize(
    "write", [dict, OmegaConf.create, json.dumps], ids=["dict", "DictConfig", "JSON text"]
)
def test_a_mapping_may_be_a_mapping_or_json_text_of_one(write: Any) -> None:
    kwargs = {"enable_thinking": False, "level": 3, "name": "a: b"}
    student = {"path": "x", "lora": {"rank": 4}}
    config = config_from_dict(
        {
            "data": {"chat_template_kwargs": write(kwargs)},
            "model": {"teacher": {"path": "somewhere"}, "student": write(student)},
        }
    )
    assert config.data.chat_template_kwargs == kwargs
    assert config.model.student.lora is not None
    assert config.model.student.lora.rank == 4


@pytest.mark.parametrize(
    "argument",
    [
        "data.chat_template_kwargs={enable_thinking: false}",
        "data.chat_template_kwargs.enable_thinking=false",
        "data.chat_template_kwargs='{\"enable_thinking\": false}'",
    ],
)
def test_a_mapping_on_the_command_line(argument: str) -> None:
    assert compose(["+experiment=gkd_quick", argument]).data.chat_template_kwargs == {
        "enable_thinking": False
    }


def test_put_merges_mappings_and_switches_sections() -> None:
    tree: dict[str, Any] = {"extra": {"a": 1}, "model": {"student": {"lora": None}}}
    put(tree, "extra", {"b": 2})
    put(tree, "model.student.lora.rank", 8)
    assert tree == {"extra": {"a": 1, "b": 2}, "model": {"student": {"lora": {"rank": 8}}}}
    put(tree, "model.student.lora", None)
    assert tree["model"]["student"]["lora"] is None


# Fingerprints


def test_fingerprint_ignores_where_a_run_lies_and_nothing_that_changes_it() -> None:
    moved = replace(VALID, trainer=replace(VALID.trainer, run_dir="elsewhere", resume="never"))
    assert fingerprint(moved) == fingerprint(VALID)
    assert fingerprint(moved, ignore=()) != fingerprint(VALID, ignore=())
    reseeded = replace(VALID, trainer=replace(VALID.trainer, seed=1))
    assert fingerprint(reseeded) != fingerprint(VALID)
    assert fingerprint(reseeded, ["trainer"]) == fingerprint(VALID, ["trainer"])
    assert re.fullmatch("[0-9a-f]{16}", fingerprint(VALID))
    with pytest.raises(ValueError, match=r"trainer\.seed"):
        fingerprint(VALID, ["trainer.sed"])


# Every experiment is what it says (CFG-07)


@pytest.mark.parametrize("name", options("experiment"))
def test_every_experiment_composes(name: str) -> None:
    config = compose([f"+experiment={name}"])
    assert config.experiment == name
    assert config.summary
    assert config.hardware
    assert config.model.requires_cuda == ("GPU" in config.hardware)
    assert config_from_dict(config_to_dict(config)) == config


@pytest.mark.parametrize("name", options("algo"))
def test_every_algorithm_composes_with_the_demo(name: str) -> None:
    supervised = name in ("sft", "kd", "pretrain", "dpo", "ipo", "simpo", "orpo", "kto")
    more = ["rollout.n=1"] if supervised else []
    more += ["model=demo"] if name in ("gkd", "kd") else []
    config = compose(["+experiment=grpo_demo", f"algo={name}", *more])
    source = (CONF / "algo" / f"{name}.yaml").read_text(encoding="utf-8")
    assert f"name: {config.algo.name}\n" in source


@pytest.mark.parametrize("group", ["data", "placement", "rollout"])
def test_group_option_chooses_its_own_name(group: str) -> None:
    field = {"data": "source", "placement": "kind", "rollout": "engine"}[group]
    for option in options(group):
        tree = compose_tree(read_request([f"{group}={option}"]))
        assert tree[group] == {**defaults()[group], field: option}


def test_the_big_recipe_runs_small() -> None:
    config = compose(["+experiment=gkd_4080", "model=demo", "placement=local"])
    assert config.model.student.path == "embedded:student-low-data"
    assert not config.model.requires_cuda
    assert config.placement.kind == "local"
    assert config.model.student.lora is not None, "the recipe's own settings stay"


# The critic is trained, so what holds for the student holds for it


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("model.critic={path: embedded:teacher, dtype: bfloat16}", ("model.critic.dtype=bfloat16", "lost")),
        ("model.critic={path: embedded:teacher, quantization: nf4}", ("model.critic.quantization", "lora")),
    ],
)
def test_a_critic_that_could_not_learn_is_refused(override: str, names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        compose(["+experiment=grpo_demo", "algo=ppo", override])
    assert all(name in str(refused.value) for name in names)
