"""The page's data: what stands in it, what it must not become, and what is no trajectory."""

import gzip
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rftmega.tools import view

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(1)"> <!-- & \u2028\u2029 \ud800 {{DATA}} {{TITLE}}'


def sample(step: int = 1, text: str = "ab", **more: Any) -> dict[str, Any]:
    values = [0.5, -0.25]
    tokens = {"id": [1, 2], "text": [text, "b"], "engine_logp": [-1.0, None], "trainer_logp": values, "gap": values,
              "advantage": values, "entropy": None}  # fmt: skip
    return {"step": step, "group": 0, "index": 3, "prompt": text, "response": text, "label": text, "reward": 1.0,
            "reward_parts": {"exact_match": 1.0}, "truncated": False, "tokens": tokens} | more  # fmt: skip


def write(path: Path, *samples: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress("".join(json.dumps(s) + "\n" for s in samples).encode()))
    return path


class Elements(HTMLParser):
    """Tags in order, and what stands in the script elements with an id."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.data: dict[str, str] = {}
        self.inside: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.inside = dict(attrs).get("id") if tag == "script" else None

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.data[self.inside] = self.data.get(self.inside, "") + data

    def handle_endtag(self, tag: str) -> None:
        self.inside = None


def test_hostile_text_comes_back_as_it_was_and_adds_no_element() -> None:
    harmless = Elements(view.page([sample(text="x")], title="x"))
    hostile = Elements(
        view.page([sample(text=HOSTILE, reward_parts={HOSTILE: 1.0})], title=HOSTILE[:90])
    )
    assert hostile.tags == harmless.tags
    table = json.loads(hostile.data["samples"])["samples"][0]
    assert (table["prompt"], table["response"], table["label"]) == (HOSTILE,) * 3
    assert table["reward_parts"] == {HOSTILE: 1.0}
    assert json.loads(hostile.data["tokens-0"])["text"] == [HOSTILE, "b"]


def test_embedded_data_holds_nothing_that_a_parser_of_html_or_javascript_looks_for() -> None:
    text = view.embedded({"a": HOSTILE})
    assert not set(text) & set("<>&\u2028\u2029\ud800")
    assert text.isascii()
    assert json.loads(text) == {"a": HOSTILE}


def test_only_the_pages_own_script_may_run_and_nothing_may_be_loaded() -> None:
    text = view.page([sample()], title="x")
    assert "content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-" in text
    assert "http:" not in text
    assert "https:" not in text
    assert "src=" not in text


def test_the_table_has_lengths_and_gaps_and_colours_end_where_few_tokens_go() -> None:
    odd = sample()
    odd["tokens"] = {
        key: [9.0] for key in ("id", "engine_logp", "trainer_logp", "gap", "advantage")
    } | {"text": ["x"]}
    found = json.loads(Elements(view.page([sample()] * 60 + [odd], title="x")).data["samples"])
    assert (
        found["samples"][0]["length"],
        found["samples"][0]["gap"],
        found["samples"][0]["gap_max"],
    ) == (2, 0.375, 0.5)
    assert found["scale"]["gap"] == 0.5
    small = sample() | {"tokens": sample()["tokens"] | {"gap": [1e-7, None]}}
    assert (
        json.loads(Elements(view.page([small], title="x")).data["samples"])["scale"]["gap"] == 0.01
    )


def test_a_run_is_read_from_its_last_step_back_and_shown_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 10, 20):
        write(
            tmp_path / f"out/trajectories/step_{step:06d}.jsonl.gz",
            sample(step),
            sample(step, "second"),
        )
    assert view.main([str(tmp_path / "out"), "--limit", "3"]) == 0
    page = tmp_path / "out/trajectories.html"
    rows = json.loads(Elements(page.read_text()).data["samples"])["samples"]
    assert [(row["step"], row["prompt"]) for row in rows] == [
        (10, "ab"),
        (20, "ab"),
        (20, "second"),
    ]
    assert "3 samples of steps 10 to 20, the last of more (--limit 3)" in capsys.readouterr().out
    assert view.main([str(tmp_path / "out"), "--limit", "6"]) == 0
    assert "6 samples of steps 1 to 20, 0.0 MB" in capsys.readouterr().out


def test_files_may_be_plain_and_the_page_goes_where_it_is_asked_to(tmp_path: Path) -> None:
    plain = tmp_path / "a.jsonl"
    plain.write_text(json.dumps(sample()))
    assert view.main([str(plain), "--output", str(tmp_path / "b.html")]) == 0
    assert (tmp_path / "b.html").is_file()


def test_images_of_an_older_file_are_shown() -> None:
    image = {"digest": "a", "path": "x.png", "grid": [1, 2, 2], "thumbnail": None}
    found = view.checked(sample(pictures=[image]))
    assert found["images"] == [image]
    assert "pictures" not in found


def test_turns_measures_and_columns_are_in_the_page_and_messages_are_not_there_twice() -> None:
    told = {"turns": [TURN], "measures": {HOSTILE: 2.0}, "columns": {HOSTILE: [1]}, "rollout": 3}
    text = view.page([view.checked(sample(**told, messages=[{"content": "once"}]))], title="x")
    found = Elements(text)
    (row,) = json.loads(found.data["samples"])["samples"]
    assert {key: row[key] for key in told} == told
    assert "once" not in text
    assert found.tags == Elements(view.page([sample()], title="x")).tags


def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-20])
    return path


@pytest.mark.parametrize(("mean", "shown"), [(0.5, True), (0.75, False)])
def test_the_accuracy_of_a_graded_reward_is_no_curve(
    mean: float, shown: bool, tmp_path: Path
) -> None:
    line = {"step": 0, "time": 1.0, "eval_easy_accuracy": 0.5, "eval_easy_mine": mean}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert "eval_easy_accuracy" in view.curves_of(tmp_path / "metrics.jsonl")
    (tmp_path / "run.json").write_text(json.dumps({"trainer": {"eval_accuracy": "mine"}}))
    assert ("eval_easy_accuracy" in view.curves_of(tmp_path / "metrics.jsonl")) is shown


COMPLETION = {
    "step": 5, "set": "easy", "adapter": "", "index": 4, "sample": 1, "prompt": "1+1=", "label": "2",
    "response": "<3", "tokens": [7, 9], "truncated": True, "scores": {"math": 0, "reward": 0.5},
}  # fmt: skip


def test_completions_of_evaluations_are_in_the_page_beside_the_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "trajectories/step_000001.jsonl.gz", sample())
    lost = {key: COMPLETION[key] for key in ("step", "set", "adapter", "index", "prompt", "label")}
    other = lost | {"sample": 0, "index": 6, "lost": "away"}
    write(tmp_path / "evaluations/step_000005.jsonl.gz", COMPLETION, other, COMPLETION)
    assert view.main([str(tmp_path)]) == 0
    assert "1 samples of steps 1 to 1, 3 completions of evaluations" in capsys.readouterr().out
    held = Elements((tmp_path / "trajectories.html").read_text()).data
    _, first, second, third = json.loads(held["samples"])["samples"]
    assert first == third == {
        "evaluation": "easy", "group": 0, "step": 5, "index": 4, "prompt": "1+1=", "label": "2", "response": "<3",
        "reward": 0.5, "reward_parts": {"math": 0}, "truncated": True, "length": 2, "gap": None, "gap_max": None, "columns": {},
    }  # fmt: skip
    assert (second["group"], second["response"], second["reward"]) == (1, "[lost: away]", None)


TURN = {"role": "tool", "name": "add", "start": 0, "stop": 1, "reward": 0.0}
BAD = {
    "scores that are text": (
        lambda folder: write(folder / "a.gz", {**COMPLETION, "scores": "x"}), '"scores" is no object',
    ),
    "an evaluation without a prompt": (
        lambda folder: write(folder / "a.gz", {**COMPLETION, "prompt": None}), '"prompt" is missing',
    ),
    "nothing there": (lambda folder: folder / "nowhere", "There is no "),
    "a folder without trajectories": (lambda folder: folder, "Was the run's trainer.trajectories 0?"),
    "half a gzip file": (lambda folder: cut(write(folder / "a.gz", sample())), "is no whole gzip file"),
    "no gzip file": (lambda folder: plain(folder / "a.gz", "x"), "is no whole gzip file"),
    "no JSON": (lambda folder: plain(folder / "a.jsonl", json.dumps(sample()) + "\n{"), "a.jsonl:2: not JSON"),
    "not UTF-8": (lambda folder: plain(folder / "a.jsonl", "\udcff"), "a.jsonl:1: not JSON"),
    "a list": (lambda folder: plain(folder / "a.jsonl", "[]"), "a.jsonl:1: no sample of a trajectory: a JSON list"),
    "no tokens": (lambda folder: write(folder / "a.gz", sample(tokens=None)), '"tokens" is missing or no dict'),
    "lists of two lengths": (
        lambda folder: write(folder / "a.gz", sample(), sample(tokens=sample()["tokens"] | {"gap": [1.0]})),
        'a.gz:2: no sample of a trajectory: "tokens" must hold lists of one length'),
    "a shorter list of what was chosen": (
        lambda folder: write(folder / "a.gz", sample(tokens=sample()["tokens"] | {"chosen": [True]})),
        '"chosen" of "tokens" must be a list as long as the others'),
    "a word for a number": (lambda folder: write(folder / "a.gz", sample(reward="much")), "is no number"),
    "a number for a word": (
        lambda folder: write(folder / "a.gz", sample(tokens=sample()["tokens"] | {"text": [1, 2]})), "is no string"),
    "a thumbnail that is none": (
        lambda folder: write(folder / "a.gz", sample(images=[{"digest": "a", "thumbnail": '"><script>'}])),
        "a thumbnail is no base64"),
    "an image without a digest": (lambda folder: write(folder / "a.gz", sample(images=[{}])), "has no digest"),
    "turns that are none": (lambda folder: write(folder / "a.gz", sample(turns=[3])), '"turns" is no list of objects'),
    "a turn of nobody": (lambda folder: write(folder / "a.gz", sample(turns=[TURN | {"role": None}])), '"role" or "name"'),
    "a turn behind the end": (lambda folder: write(folder / "a.gz", sample(turns=[TURN | {"stop": 3}])), "from 0 to 3 is not"),
    "a turn that ends before it begins": (
        lambda folder: write(folder / "a.gz", sample(turns=[TURN | {"start": 2}])), "from 2 to 1 is not"),
    "a turn with words for a reward": (
        lambda folder: write(folder / "a.gz", sample(turns=[TURN | {"reward": "much"}])), "a turn's reward is no number"),
    "a list of measures": (lambda folder: write(folder / "a.gz", sample(measures=[])), '"measures" is no object'),
    "a word for a measure": (lambda folder: write(folder / "a.gz", sample(measures={"a": "b"})), "a measure is no number"),
    "text for columns": (lambda folder: write(folder / "a.gz", sample(columns="x")), '"columns" is no object'),
    "text for messages": (lambda folder: write(folder / "a.gz", sample(messages="x")), '"messages" is no list of objects'),
    "half a rollout": (lambda folder: write(folder / "a.gz", sample(rollout=0.5)), "is no whole number"),
    "a trajectory of no number": (lambda folder: write(folder / "a.gz", sample(trajectory=1)), "one is missing"),
    "no line": (lambda folder: write(folder / "a.gz"), "holds no sample"),
}  # fmt: skip


def plain(path: Path, text: str) -> Path:
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return path


@pytest.mark.parametrize("what", list(BAD))
def test_what_cannot_be_shown_is_one_line_and_no_page(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, complaint = BAD[what]
    assert view.main([str(make(tmp_path)), "--output", str(tmp_path / "page.html")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert complaint in said
    assert not (tmp_path / "page.html").exists()


def test_a_limit_of_none_and_a_page_that_cannot_be_written_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.jsonl.gz", sample())
    assert view.main([str(path), "--limit", "0"]) == 2
    assert view.main([str(path), "--output", str(tmp_path / "no/page.html")]) == 2
    assert capsys.readouterr().err.count("error: ") == 2


def test_the_chief_metrics_of_a_run_are_curves_in_its_page(tmp_path: Path) -> None:
    write(tmp_path / "trajectories/step_000001.jsonl.gz", sample(graded=None))
    lines = [
        {"step": 0, "time": 1.0, "eval_accuracy": 0.25},
        {"step": 1, "time": 2.0, "reward": 0.5, "loss": None, "host": 3.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert view.main([str(tmp_path)]) == 0
    held = json.loads(Elements((tmp_path / "trajectories.html").read_text()).data["samples"])
    assert held["curves"] == {"eval_accuracy": [[0, 0.25]], "reward": [[1, 0.5]]}
    assert held["samples"][0]["graded"] is None


@pytest.mark.parametrize("text", ["no JSON\n", "[1]\n", '{"reward": 1}\n', "\xff\n"])
def test_metrics_that_can_not_be_read_are_one_line_and_no_traceback(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "trajectories/step_000001.jsonl.gz", sample())
    (tmp_path / "metrics.jsonl").write_bytes(text.encode("latin-1"))
    assert view.main([str(tmp_path)]) != 0
    said = capsys.readouterr().err
    assert "metrics.jsonl can't be read" in said and "Traceback" not in said
