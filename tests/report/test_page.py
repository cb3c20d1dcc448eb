"""The report of a run: complete, self-contained, safe with hostile text, and there with hardly any data."""

import json
import math
import re
from html.parser import HTMLParser

import pytest

from miniverl.config import ConfigError
from miniverl.metrics import JsonlSink, write_samples
from miniverl.report import write_report

HOSTILE = (
    '<script>alert("x")</script><img src=http://evil.example/a.png onerror=alert(1)>'
    "\0\u202e\ud800&amp;{{ 7*7 }}"
)


class Page(HTMLParser):
    """Collects what a browser would act on."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text, self.ids, self._open = [], [], "", [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]
        self._open.append(tag)

    def handle_endtag(self, tag):
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data):
        if not {"script", "style"} & set(self._open):
            self.text += data


def page_of(run_dir):
    text = write_report(run_dir).read_text(encoding="utf-8")
    assert text.rstrip().endswith("</html>")
    return text, Page(text)


def fill(run_dir, steps=40, text="<think>1+1</think>2"):
    sink = JsonlSink(run_dir / "metrics.jsonl")
    sink.log(0, {"val/accuracy": 0.25})
    for step in range(1, steps + 1):
        sink.log(step, {
            "actor/distillation_loss": 1 / step, "actor/grad_norm": math.nan if step == 7 else 1.0,
            "response_length/mean": 30.0, "perf/throughput": 8000.0, "perf/total_num_tokens": 250,
            "timing_s/gen": 0.6, "timing_s/score": 0.2, "timing_s/update_actor": 0.2,
            "timing_s/step": 1.0,
        })
        row = {"uid": "a#0", "sample": 0, "source": "student", "finish": "length", "response_tokens": 5,
               "prompt": text, "response": text, "answer": text}
        write_samples(run_dir, step, [row | {"score": score} for score in (1.0, 0.0, None)])
    sink.log(steps, {"val/accuracy": 0.75})
    sink.close()
    (run_dir / "config.json").write_text(json.dumps({
        "experiment": "gkd_demo", "summary": text, "eval": {"size": 200}, "trainer": {"steps": steps},
        "algo": {"name": "gkd", "divergence": "jsd", "beta": 0.5, "lam": 1.0},
        "extra": {text: {"note": text}},
    }))
    (run_dir / "environment.json").write_text(json.dumps({
        "python": "CPython 3.11", "memory_bytes": 8 * 2**30, "gpus": [], "packages": {"torch": "2.13.0"},
        "cpu": {"model": "Made-up 9000", "logical_cores": 8, "usable_cores": 2, "torch_threads": 1},
        "git": {"commit": "abc123", "changed": True},
    }))


def test_headline_and_tables_by_hand(tmp_path):
    fill(tmp_path)
    (tmp_path / "result.json").write_text(json.dumps({
        "accuracy_before": 0.25, "accuracy_after": 0.75, "seconds": 125.0,
        "memory": {"estimate": {"weights": 2**20, "total": 2**30}, "measured": {"total": 2**29},
                   "budget": 2**34},
    }))
    _, page = page_of(tmp_path)
    for said in (
        "25.0% → 75.0%", "+50.0 points on 200 held-out problems", "2:05", "of 40", "10.0k", "8.0k tokens/s",
        "generation 60%", "on-policy distillation, jsd beta=0.5, lam=1.0", "1.0 MiB", "512.0 MiB", "0.50",
        "16.00 GiB", "Made-up 9000, 2 of 8 logical cores", "abc123, with uncommitted changes", "2.13.0",
        "NaN or infinite at 1 step(s): 7", "trainer.steps", "120 samples of 40 step(s)",
    ):
        assert said in page.text, said
    assert " recorded" not in page.text
    assert sorted(p.name for p in (tmp_path / "plots").iterdir()) == [
        "accuracy.png", "grad_norm.png", "loss.png", "response_length.png", "throughput.png", "timing.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in (tmp_path / "plots").iterdir())


def test_without_a_result_the_metrics_speak(tmp_path):
    fill(tmp_path)
    _, page = page_of(tmp_path)
    for said in ("25.0% → 75.0%", "0:40", "No memory figures recorded."):
        assert said in page.text, said


def test_page_fetches_nothing_and_its_ids_are_unique(tmp_path):
    fill(tmp_path)
    text, page = page_of(tmp_path)
    loaders = ("src", "srcset", "href", "xlink:href", "action", "data", "poster")
    assert [value for name, value in page.attributes if name in loaders and not value.startswith("#")] == []
    assert not re.search(r"url\((?!#)|@import|xmlns", text)
    assert "default-src 'none'" in text
    assert len(page.ids) == len(set(page.ids))
    links = [value for name, value in page.attributes if name in ("href", "xlink:href")]
    links += re.findall(r"url\((#[^)]*)\)", text)
    assert links and {link[1:] for link in links} <= set(page.ids)
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "") and "https://" not in text


def test_hostile_text_is_shown_not_obeyed(tmp_path):
    fill(tmp_path)
    _, plain = page_of(tmp_path)
    fill(tmp_path, text=HOSTILE)
    text, page = page_of(tmp_path)
    assert page.tags.count("script") == plain.tags.count("script") == 1
    assert "img" not in page.tags and not any(name.startswith("on") for name, _ in page.attributes)
    assert '<script>alert("x")</script>' in page.text and "{{ 7*7 }}" in page.text and "&amp;" in page.text
    assert "⟨U+0000⟩⟨U+202E⟩" in page.text
    assert not re.search("[\0\u202e\ud800]", text)


def test_right_and_wrong_can_be_told_apart(tmp_path):
    fill(tmp_path, steps=1)
    _, page = page_of(tmp_path)
    assert [value for name, value in page.attributes if name == "data-right"] == ["yes", "no", "none"]


def test_an_empty_directory_gives_a_page_that_says_so(tmp_path):
    _, page = page_of(tmp_path)
    for what in (
        "evaluations", "training loss", "timings", "response lengths", "throughput", "gradient norms",
        "samples", "memory figures", "configuration", "environment", "metrics",
    ):
        assert f"No {what} recorded." in page.text, what
    assert not (tmp_path / "plots").exists()


@pytest.mark.parametrize("metrics", [
    {"val/accuracy": 0.5}, {"actor/nll_loss": 0.0}, {"actor/nll_loss": -1.0}, {"actor/nll_loss": math.nan},
    {"timing_s/gen": 0.0}, {"timing_s/testing": 1.0}, {"custom/😀<b>": 1e308}, {},
])
def test_one_step_with_one_number(tmp_path, metrics):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log(0, metrics)
    sink.close()
    _, page = page_of(tmp_path)
    assert "b" not in page.tags


def test_long_runs_give_small_pages(tmp_path):
    values = {"val/accuracy": 0.5, "timing_s/gen": 1.0}
    lines = [values | {"step": step, "actor/nll_loss": 1 + step % 7} for step in range(20_000)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text, _ = page_of(tmp_path)
    assert len(text) < 300_000


def test_long_responses_are_cut_aloud(tmp_path):
    row = {"uid": "a", "sample": 0, "prompt": "p", "response": "r" * 5000, "response_tokens": 5000}
    write_samples(tmp_path, 1, [row])
    _, page = page_of(tmp_path)
    assert "… (1000 more characters)" in page.text


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_damaged_file_is_named(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        write_report(tmp_path)
