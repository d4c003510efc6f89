from rftmega.core.types import Prompt, Rollout
from rftmega.rewards import MajorityReward, Reasoning
from tests.rollouts import answered


def said(text: str) -> Rollout:
    return answered(tuple(map(ord, text)), (0.0,) * len(text), "stop", 0)


def test_answers_are_scored_by_what_most_answers_to_the_same_prompt_say() -> None:
    first, second = Prompt((1,), label="wrong on purpose"), Prompt((1,))
    asked = [first] * 4 + [second] * 4
    answers = [said(text) for text in ("7", "07", "8", "", "9", "8", "8", "")]
    found = MajorityReward(Reasoning.plain(lambda ids: "".join(map(chr, ids))), 4)(asked, answers)
    assert [score["reward"] for score in found] == [1, 1, 0, 0, 0, 1, 1, 0]
    assert found[0] == {"majority": 1.0, "reward": 1.0}


def test_neighbouring_groups_of_one_prompt_vote_each_for_itself() -> None:
    """A data set may hold a prompt twice, and a batch the same object twice."""
    prompt = Prompt((1,))
    answers = [said(text) for text in ("7", "7", "8", "9", "9", "7")]
    found = MajorityReward(Reasoning.plain(lambda ids: "".join(map(chr, ids))), 3)(
        [prompt] * 6, answers
    )
    assert [score["reward"] for score in found] == [1, 1, 0, 1, 1, 0]
