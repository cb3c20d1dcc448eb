"""The rule reward, and the text it is given."""

import numpy as np
import pytest

from miniverl.controller.scoring import response_text
from miniverl.rewards.exact_match import exact_match, final_answer
from miniverl.rewards.sample import Sample
from miniverl.types import Rollout
from tests.kit import tiny_tok


def matches(text, answer):
    return exact_match(Sample("s", "", text, answer))


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("<think>2+3+0=5</think>5", "5", 1.0),
        ("<think>2+3+0=5</think> 5\n", " 5", 1.0),
        ("5", "5", 1.0),
        ("<think>5</think>", "5", 0.0),
        ("<think>5", "5", 0.0),
        ("</think>4</think>5", "5", 1.0),
        ("05", "5", 0.0),
        ("55", "5", 0.0),
        ("", "", 1.0),
    ],
)
def test_exact_match(text, answer, score):
    assert matches(text, answer) == score


def test_composed_and_decomposed_characters_are_the_same_answer():
    assert matches("Cafe\u0301", "Caf\u00e9") == matches("Caf\u00e9", "Cafe\u0301") == 1.0
    assert matches("\u0664", "4") == 0.0, "nothing but NFC is forgiven"
    assert matches("\u200f4", "4") == 0.0
    assert matches("\ud800\x00", "\ud800\x00") == 1.0, "lone surrogates and NUL do not crash it"


def rollout(ids, finish):
    ids, ones = np.array(ids), np.ones(len(ids))
    return Rollout(
        uid="u",
        sample=0,
        prompt_ids=np.array([1]),
        response_ids=ids,
        mask=ones,
        log_probs=-ones,
        version=(0, 0),
        finish=finish,
    )


def test_tok_05_scorers_see_the_full_decode():
    """TOK-05: characters split over tokens reach the scorer whole, with a stop token right after them."""
    tok = tiny_tok()
    text = "<think>世界🙂</think>世界🙂"
    ids = tok(text, add_special_tokens=False)["input_ids"]
    assert "\ufffd" in "".join(str(tok.decode([i])) for i in ids), "token by token it breaks"
    seen = response_text(rollout([*ids, tok.eos_token_id], "stop"), tok)
    assert seen == text
    assert final_answer(seen) == "世界🙂"
    assert matches(seen, "世界🙂") == 1.0
    assert response_text(rollout(ids, "length"), tok) == text
