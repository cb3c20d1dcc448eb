"""From a path in the config to a directory, or to a sentence that says why not."""

import json
import time

import pytest

from miniverl.config import ConfigError
from miniverl.models.locate import EMBEDDED, HUB_DEADLINE_S, locate, read_config


def test_embedded_models_and_directories_are_found(tmp_path):
    assert locate("teacher", "embedded:teacher") == str(EMBEDDED / "teacher")
    (tmp_path / "config.json").write_text('{"model_type": "mine"}')
    assert locate("student", str(tmp_path)) == str(tmp_path)
    assert read_config(str(tmp_path)) == {"model_type": "mine"}


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("", r"model\.student\.path is empty"),
        ("embedded:nobody", r"model\.student\.path='embedded:nobody': no such.*embedded:teacher"),
        ("/no/such/model", "there is no such directory"),
        ("./no-such-model", "there is no such directory"),
        ("~/no-such-model-of-miniverl", "there is no such directory"),
        ("one-word", "there is no such directory"),
        ("a/b/c", "there is no such directory"),
    ],
)
def test_what_is_not_there_is_said_at_once(path, says):
    with pytest.raises(ConfigError, match=says):
        locate("student", path)


def test_a_directory_without_a_config_is_no_model(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        locate("teacher", str(tmp_path))


def test_a_hub_name_that_cannot_be_had_says_so_within_the_deadline():
    """Tests run offline; the local cache has no such model."""
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"model\.teacher\.path='nobody/no-such-model'.*model=demo"):
        locate("teacher", "nobody/no-such-model")
    assert time.monotonic() - start < HUB_DEADLINE_S + 2


def test_a_config_is_read_without_a_network():
    assert read_config("embedded:teacher") == json.loads((EMBEDDED / "teacher" / "config.json").read_text())
    published = read_config("Qwen/Qwen3-0.6B")
    assert published is not None and published["model_type"] == "qwen3"
    assert read_config("nobody/no-such-model") is None
