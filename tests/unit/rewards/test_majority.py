from rftmega.rewards import MajorityReward
from rftmega.types import Completion, Prompt


def said(text: str) -> Completion:
    return Completion(tuple(map(ord, text)), (0.0,) * len(text), "stop", 0)


def test_answers_are_scored_by_what_most_answers_to_the_same_prompt_say() -> None:
    first, second = Prompt((1,), label="wrong on purpose"), Prompt((1,))
    asked = [first] * 4 + [second] * 3
    answers = [said(text) for text in ("7", "07", "8", "", "9", "8", "8")]
    found = MajorityReward(lambda ids: "".join(map(chr, ids)))(asked, answers)
    assert [score["reward"] for score in found] == [1, 1, 0, 0, 0, 1, 1]
    assert found[0] == {"majority": 1.0, "reward": 1.0}
