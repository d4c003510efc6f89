import threading
import time
from collections.abc import Sequence

import pytest

from rftmega.core.errors import RewardError
from rftmega.core.types import Prompt, Rollout
from rftmega.rollout.pool.reward_workers import THREADS, RewardWorkers
from tests.rollouts import answered

PROMPTS = [Prompt((n,), index=n) for n in range(4)]
COMPLETIONS = [answered((n, n), (0.0, 0.0), "stop", 0) for n in range(4)]


def score(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
    return [
        {"reward": float(10 * p.index + c.response_ids[0])}
        for p, c in zip(prompts, rollouts, strict=True)
    ]


def test_every_answer_gets_the_score_of_its_own_prompt_in_whatever_order_they_finish() -> None:
    with RewardWorkers(score, PROMPTS) as judging:
        for places in ([2], [3, 0], [1]):
            judging.finished(places, [COMPLETIONS[place] for place in places])
        found = judging.scored()
    assert [found[n].scores for n in range(4)] == [{"reward": 11.0 * n} for n in range(4)]
    assert [found[n].response_ids for n in range(4)] == [
        completion.response_ids for completion in COMPLETIONS
    ]


def test_rewards_are_at_work_while_answers_are_still_to_come() -> None:
    begun, last = threading.Event(), threading.Event()

    def waits(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
        begun.set()
        assert last.wait(10), "it was asked only after the last answer"
        return score(prompts, rollouts)

    with RewardWorkers(waits, PROMPTS[:2]) as judging:
        judging.finished([0], COMPLETIONS[:1])
        assert begun.wait(10)
        judging.finished([1], COMPLETIONS[1:2])
        last.set()
        assert [completion.scores for completion in judging.scored().values()] == [
            {"reward": 0.0},
            {"reward": 11.0},
        ]


def test_what_a_reward_raises_is_raised_where_its_scores_are_wanted() -> None:
    def broken(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
        raise ValueError("no such label")

    judging = RewardWorkers(broken, PROMPTS)
    judging.finished([0], COMPLETIONS[:1])
    with judging, pytest.raises(ValueError, match="no such label"):
        judging.scored()


def test_a_reward_that_takes_longer_than_its_limit_is_refused_and_nobody_waits_for_it_any_more() -> (
    None
):
    never = threading.Event()

    def hangs(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
        never.wait(600)
        return []

    with RewardWorkers(hangs, PROMPTS, limit=0.1) as judging:
        judging.finished([1, 2], COMPLETIONS[1:3])
        with pytest.raises(
            RewardError,
            match=r"reward.timeout=0.1 s for 2 completion\(s\), the first of them to prompt 1",
        ):
            judging.scored()
    waiting = [thread.daemon for thread in threading.enumerate() if thread.name == "reward"]
    never.set()
    assert all(waiting), "or the process could not end"


def test_a_request_to_stop_ends_the_wait_for_scores() -> None:
    never = threading.Event()

    def some(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
        if prompts[0].index == 1:
            never.wait(600)
        return score(prompts, rollouts)

    with RewardWorkers(some, PROMPTS) as judging:
        judging.finished([0], COMPLETIONS[:1])
        judging.finished([1], COMPLETIONS[1:2])
        assert not judging.settled(lambda: True)
        assert judging.settled(lambda: True, 0, 1), "those that are scored are"
        assert set(judging.ready()) == {0}
        never.set()


def test_answers_that_wait_for_a_thread_are_not_late_yet() -> None:
    """The limit is of the reward's own time, not of a queue before it."""
    begun = threading.Semaphore(0)

    def slow(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
        begun.release()
        time.sleep(0.2)
        return score(prompts, rollouts)

    many = [Prompt((n,), index=n) for n in range(4 * THREADS)]
    with RewardWorkers(slow, many, limit=30.0) as judging:
        for place in range(len(many)):
            judging.finished([place], [COMPLETIONS[0]])
        assert len(judging.scored()) == len(many)
        assert len(judging._began) == len(many)
