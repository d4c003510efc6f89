import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rftmega.config import RewardConfig
from rftmega.core.errors import ConfigError, RewardError
from rftmega.core.types import Completion, Prompt, Rollout, Trajectory
from rftmega.rewards import chat_endpoint, create
from rftmega.rewards.chat_endpoint import LONGEST_WAIT, waiting_time
from rftmega.rewards.judge import JudgePart, filled, places_of, template_of
from rftmega.rewards.part import Answer, Undecided

Reply = tuple[int, str, dict[str, str]]
Say = Callable[[dict[str, Any]], Reply]
QUESTION = "Rate {completion} for {prompt}, as {label}"


@contextmanager
def judge(say: Say) -> Iterator[tuple[str, list[dict[str, Any]], list[str]]]:
    """Yields (address, what was asked so far, the keys that came) of a judge that `say` speaks for."""
    asked: list[dict[str, Any]] = []
    keys: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            keys.append(f"{self.path} {self.headers['authorization']}")
            status, text, headers = say(asked[-1])
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *said: Any) -> None: ...

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, *what: Any) -> None: ...

    with Quiet(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}).start()
        try:
            yield f"http://127.0.0.1:{running.server_port}/v1", asked, keys
        finally:
            running.shutdown()


def says(text: str | None) -> Reply:
    """Returns a chat completion."""
    return 200, json.dumps({"choices": [{"message": {"content": text}}]}), {}


def always(*replies: Reply) -> Say:
    """Returns what gives one reply after another, the last again and again."""
    left = list(replies)
    return lambda asked: left.pop(0) if len(left) > 1 else left[0]


def part(url: str, **options: Any) -> JudgePart:
    given = {"judge_retries": 2, "judge_template": QUESTION, "judge_model": "wise"} | options
    config = RewardConfig(judge=1.0, judge_url=url, **given)
    return JudgePart(config, lambda ids: f"p{ids[0]}", pause=0.001)


def answers(count: int) -> list[Answer]:
    return [Answer(f"r{n}", f"l{n}", "", (n,)) for n in range(count)]


def test_answers_are_asked_about_and_numbers_are_scaled_in_order() -> None:
    def say(asked: dict[str, Any]) -> Reply:
        return says(f"Thus, score: {asked['messages'][0]['content'][5:6]}")

    with judge(say) as (url, asked, keys):
        found = part(url, judge_scale=[1.0, 5.0])(
            [Answer("1", "a", "", (7,)), Answer("4", "b", "", (8,))]
        )
    assert found == [0.0, 0.75]
    first = min(asked, key=json.dumps)
    assert first["messages"] == [{"role": "user", "content": "Rate 1 for p7, as a"}]
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("wise", 0.0, 1024)
    assert set(keys) == {"/v1/chat/completions None"}


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("Score: 7", 0.7), ("score = 2.5", 0.25), ("**Score:** 3/10", 0.3),
        ("Score: 1, no: Score: **8**", 0.8), ("Score: 0", 0.0),
    ],
)  # fmt: skip
def test_the_last_score_counts(said: str, score: float) -> None:
    with judge(always(says(said))) as (url, _, _):
        assert part(url)(answers(1)) == [score]


@pytest.mark.parametrize("said", ["Good.", "Score: 11", "Score: -1", "", None])
def test_what_says_no_number_of_the_scale_is_undecided(said: str | None) -> None:
    with judge(always(says(said))) as (url, _, _):
        assert [type(score) for score in part(url)(answers(1))] == [Undecided]


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_question_that_is_refused_is_undecided_and_not_asked_again(status: int) -> None:
    with judge(always((status, "too long", {}))) as (url, asked, _):
        assert [type(score) for score in part(url)(answers(1))] == [Undecided]
    assert len(asked) == 1


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_judge_that_answers_nobody_ends_the_run(status: int) -> None:
    with judge(always((status, "no", {}))) as (url, asked, _):
        with pytest.raises(RewardError, match=f"answers with status {status}, 'no'"):
            part(url)(answers(1))
    assert len(asked) == 1


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_judge_is_asked_again(status: int) -> None:
    busy = (status, "busy", {})
    with judge(always(busy, busy, says("Score: 5"))) as (url, asked, _):
        assert part(url)(answers(1)) == [0.5]
        assert len(asked) == 3
    with judge(always(busy)) as (url, asked, _):
        with pytest.raises(RewardError, match=r"nothing in 3 attempt\(s\).*busy"):
            part(url)(answers(1))
    assert len(asked) == 3


def test_a_judge_that_is_gone_ends_the_run_after_its_attempts() -> None:
    with judge(always(says("Score: 5"))) as (url, _, _):
        pass
    with pytest.raises(RewardError, match=r"nothing in 3 attempt\(s\).*ConnectError"):
        part(url)(answers(1))


def test_the_pause_is_what_the_judge_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(chat_endpoint.time, "sleep", pauses.append)
    asks = (429, "busy", {"retry-after": "17"})
    with judge(always(asks, (429, "busy", {}), says("Score: 5"))) as (url, _, _):
        assert part(url, judge_retries=5)(answers(1)) == [0.5]
    assert [pause for pause in pauses if pause] == [17.0, 0.002]


def test_the_time_that_a_header_asks_for_is_read_in_both_forms() -> None:
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)
    assert 0 < waiting_time(soon) <= 100
    assert waiting_time("3") == 3
    assert waiting_time("1e9") == LONGEST_WAIT
    assert [
        waiting_time(text) for text in ("", "soon", "-3", "nan", "Wed, 21 Oct 2015 07:28:00 GMT")
    ] == [0.0] * 5


def test_requests_begin_at_the_pace_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(chat_endpoint.time, "sleep", pauses.append)
    monkeypatch.setattr(chat_endpoint.time, "monotonic", lambda: 100.0)
    pace = chat_endpoint.Pace(4.0)
    for _ in range(3):
        pace.wait()
    assert pauses == [0.0, 0.25, 0.5]


def test_no_more_requests_are_under_way_than_allowed() -> None:
    both, most, now, lock = threading.Barrier(2), 0, 0, threading.Lock()

    def say(asked: dict[str, Any]) -> Reply:
        nonlocal most, now
        with lock:
            now += 1
            most = max(most, now)
        both.wait(60)  # two are here at once
        with lock:
            now -= 1
        return says("Score: 5")

    with judge(say) as (url, asked, _):
        assert part(url, judge_concurrency=2)(answers(6)) == [0.5] * 6
    assert (most, len(asked)) == (2, 6)


def test_one_question_is_asked_once_even_by_several_threads() -> None:
    with judge(always(says("Score: 5"))) as (url, asked, _):
        judging = part(url)
        same = [Answer("r", "l", "", (1,))] * 8
        assert judging(same) == judging(same) == [0.5] * 8
        assert len(asked) == 1
        judging([Answer("r", "other", "", (1,))])
    assert len(asked) == 2


def test_a_failed_question_is_not_kept() -> None:
    with judge(always((401, "no", {}), says("Score: 5"))) as (url, _, _):
        judging = part(url)
        with pytest.raises(RewardError):
            judging(answers(1))
        assert judging(answers(1)) == [0.5]


def test_a_file_keeps_answers_for_later_runs_but_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cr3t")
    file = tmp_path / "folder" / "judged.jsonl"
    options = {"judge_cache": str(file), "judge_key_env": "JUDGE_KEY"}
    with judge(always(says("Score: 5"))) as (url, asked, keys):
        assert part(url, **options)(answers(3)) == [0.5] * 3
        file.write_text(file.read_text() + '{"key": "torn')
        assert part(url, **options)(answers(3)) == [0.5] * 3
        assert len(asked) == 3
        # what the number is read by does not matter
        assert part(url, judge_scale=[0.0, 20.0], **options)(answers(3)) == [0.25] * 3
        assert len(asked) == 3
        part(url, judge_model="wiser", **options)(answers(3))
        assert len(asked) == 6
    assert set(keys) == {"/v1/chat/completions Bearer s3cr3t"}
    assert "s3cr3t" not in file.read_text()


def test_errors_do_not_show_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cr3t")
    with judge(always((403, "no", {}))) as (url, _, _):
        with pytest.raises(RewardError) as raised:
            part(url + "?key=s3cr3t", judge_key_env="JUDGE_KEY")(answers(1))
    assert "s3cr3t" not in str(raised.value)
    monkeypatch.setenv("JUDGE_KEY", "s3cr3t\n\x07")
    with pytest.raises(ConfigError, match="JUDGE_KEY") as refused:
        part("http://x", judge_key_env="JUDGE_KEY")
    assert "s3cr3t" not in str(refused.value)


@pytest.mark.parametrize("body", ["", "[]", '{"choices": []}', '{"choices": [{}]}', "[" * 100_000])
def test_what_is_no_chat_completion_ends_the_run(body: str) -> None:
    with judge(always((200, body, {}))) as (url, _, _):
        with pytest.raises(RewardError, match="gave no chat completion"):
            part(url)(answers(1))


def test_messages_of_the_data_are_filled_in_and_an_answers_braces_stay() -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
    ]
    answer = Answer("{label}", "l", "", (1,), record=json.dumps({"prompt": messages}))
    places = places_of(answer, lambda ids: "decoded")
    assert filled("{prompt} {completion} {label} {other}", places) == "q {label} l {other}"
    assert json.loads(places["messages"]) == [
        *messages,
        {"role": "assistant", "content": "{label}"},
    ]


def test_a_template_may_be_a_file_and_must_show_the_answer(tmp_path: Path) -> None:
    (tmp_path / "question.md").write_text("How good is {completion}?")
    assert template_of(str(tmp_path / "question.md")) == "How good is {completion}?"
    assert "{completion}" in template_of("")
    with pytest.raises(ConfigError, match="can't be read"):
        template_of(str(tmp_path / "none.txt"))
    with pytest.raises(ConfigError, match="shows the judge no completion"):
        template_of("How good is it?")


def test_undecided_answers_are_counted_in_the_scores() -> None:
    with judge(
        lambda asked: says("Score: 5" if "r0" in asked["messages"][0]["content"] else "Hm.")
    ) as (url, _, _):
        config = RewardConfig(
            exact_match=0.0, judge=2.0, judge_url=url, judge_model="wise", judge_template=QUESTION
        )
        reward = create(config, lambda ids: f"r{ids[0]}")
        trajectories = [Trajectory.of((9,), Completion((n,), (0.0,), "stop", 0)) for n in range(2)]
        prompts = [Prompt((9,), label="l")] * 2
        found = reward(prompts, [Rollout((trajectory,)) for trajectory in trajectories])
    assert [(each["judge"], each["judge_undecided"], each["reward"]) for each in found] == [
        (0.5, 0.0, 1.0),
        (0.0, 1.0, 0.0),
    ]
