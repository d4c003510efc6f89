import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftmega.rewards.vote import canonical, majority, vote_rewards


@pytest.mark.parametrize(
    "same",
    [
        [
            "7",
            " 7\n",
            "07",
            "7.0",
            "+7",
            "$7$",
            "7.",
            r"so \boxed{7}",
            r"\boxed{8}, no, \boxed{7}",
            r"\boxed{7.00} or \boxed{9",
        ],
        [r"\boxed{\text{a} b}", r"\boxed{c} { \boxed{\text{a} b}", r"} \text{a} b"[2:]],
        ["1000", "1,000", "1,000.0"],
        ["1/2", "0.5", ".5", "2/4"],
        ["Paris", "paris", " PARIS. "],
        [r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"],
        ["New  York", "new york"],
        ["1/0"],
        ["9" * 5000],
    ],
)
def test_answers_that_say_the_same_are_counted_as_one(same: list[str]) -> None:
    assert len({canonical(answer) for answer in same}) == 1
    assert canonical(same[0]) is not None


def test_answers_that_differ_stay_apart() -> None:
    different = ["7", "-7", "70", "7/3", "1,00", "7 8", "x", "1/0", "2/0", "1.5/2", "٣x", "", "."]
    assert len({canonical(answer) for answer in different}) == len(different) - 1, (
        "the last two say nothing, alike"
    )


@pytest.mark.parametrize("nothing", [None, "", "  ", "$$", r"\boxed{}"])
def test_who_says_nothing_does_not_vote(nothing: str | None) -> None:
    assert majority([nothing, nothing, "x"]) == "x"
    assert majority([nothing] * 3) is None
    assert vote_rewards([[nothing] * 3, [nothing, nothing, "x"]]) == [[0.0] * 3, [0.0, 0.0, 1.0]]


def test_of_equally_many_the_first_to_appear_wins() -> None:
    assert majority(["b", "a", "a", "b"]) == "b"
    assert majority(["c", "a", "b", "b", "a"]) == "a"
    assert majority([]) is None


def test_each_group_votes_on_its_own() -> None:
    assert vote_rewards([["7", "8", "7.0"], ["8", "7", "08"]], train=2) == [
        [1.0, 0.0, 1.0],
        [1.0, 0.0, 1.0],
    ]


def test_a_group_too_small_to_train_on_is_refused() -> None:
    with pytest.raises(ValueError, match="A group of 2 completions can't give 3"):
        vote_rewards([["a"] * 3, ["a"] * 2], train=3)


@given(st.lists(st.sampled_from([None, "a", "b", "c"]), max_size=9))
def test_the_rewarded_are_the_largest_camp(answers: list[str | None]) -> None:
    sizes = {answer: answers.count(answer) for answer in answers if answer is not None}
    (rewards,) = vote_rewards([answers])
    rewarded = {answer for answer, reward in zip(answers, rewards, strict=True) if reward}
    assert rewarded == (
        {next(a for a in answers if sizes.get(a) == max(sizes.values()))} if sizes else set()
    )
