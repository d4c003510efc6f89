import threading
from collections.abc import Sequence

import pytest

from rftmega.strategy.judging import Judging
from rftmega.types import Completion, Prompt

PROMPTS = [Prompt((n,), index=n) for n in range(4)]
ANSWERS = [Completion((n, n), (0.0, 0.0), "stop", 0) for n in range(4)]


def score(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[dict[str, float]]:
    return [{"reward": float(10 * p.index + c.token_ids[0])} for p, c in zip(prompts, completions, strict=True)]


def test_every_answer_gets_the_score_of_its_own_prompt_in_whatever_order_they_finish() -> None:
    with Judging(score, PROMPTS) as judging:
        for places in ([2], [3, 0], [1]):
            judging.finished(places, [ANSWERS[place] for place in places])
        found = judging.scored()
    assert [found[n].scores for n in range(4)] == [{"reward": 11.0 * n} for n in range(4)]
    assert [found[n].token_ids for n in range(4)] == [answer.token_ids for answer in ANSWERS]


def test_rewards_are_at_work_while_answers_are_still_to_come() -> None:
    begun, last = threading.Event(), threading.Event()

    def waits(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[dict[str, float]]:
        begun.set()
        assert last.wait(10), "it was asked only after the last answer"
        return score(prompts, completions)

    with Judging(waits, PROMPTS[:2]) as judging:
        judging.finished([0], ANSWERS[:1])
        assert begun.wait(10)
        judging.finished([1], ANSWERS[1:2])
        last.set()
        assert [answer.scores for answer in judging.scored().values()] == [{"reward": 0.0}, {"reward": 11.0}]


def test_what_a_reward_raises_is_raised_where_its_scores_are_wanted() -> None:
    def broken(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[dict[str, float]]:
        raise ValueError("no such label")

    judging = Judging(broken, PROMPTS)
    judging.finished([0], ANSWERS[:1])
    with judging, pytest.raises(ValueError, match="no such label"):
        judging.scored()
