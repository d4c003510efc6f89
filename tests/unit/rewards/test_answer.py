import pytest

from rftmega.config import RewardConfig
from rftmega.core.errors import ConfigError
from rftmega.core.types import Prompt, Rollout
from rftmega.rewards import MajorityReward, Reasoning, create
from rftmega.rewards.answer import answer_of
from rftmega.rewards.exact_match import exact_match_rule
from tests.rollouts import answered


@pytest.mark.parametrize(
    ("pattern", "response", "answer"),
    [
        ("", "12+30=42", "12+30=42"),
        ("", "", ""),
        (r"=(\d+)$", "12+30=42", "42"),
        (r"=(\d+)$", "12+30=", None),
        (r"\d+", "12, no: 13.", "13"),
        (r"is (\d+)( exactly)?", "is 12 or is 13 exactly", "13"),
        (r"yes|is (\d+)", "is 12, yes", None),  # the last match, which has no group
        (r"no", "", None),
    ],
)
def test_the_answer_is_the_first_group_of_the_last_match_or_the_match_or_the_whole(
    pattern: str, response: str, answer: str | None
) -> None:
    assert answer_of(pattern)(response) == answer


def decode(ids: tuple[int, ...]) -> str:
    return "".join(map(chr, ids))


def said(text: str) -> Rollout:
    return answered(tuple(map(ord, text)), (0.0,) * len(text), "stop", 0)


def test_an_exact_match_compares_the_answer_alone_and_a_response_without_one_matches_no_label() -> (
    None
):
    reward = create(RewardConfig(answer_pattern=r"=(.*)"), decode)
    texts = ["12+30= 42\n", "42+0=43", "42", "12+30="]
    assert [
        score["exact_match"]
        for score in reward([Prompt((1,), "42")] * 4, [said(text) for text in texts])
    ] == [1, 0, 0, 0]
    assert reward([Prompt((1,), "")], [said("42")])[0]["exact_match"] == 0


@pytest.mark.parametrize(
    ("answer", "label", "exact", "ignoring_case", "numeric"),
    [
        ("Yes", "YES", 0, 1, 0),
        ("Straße", "STRASSE", 0, 1, 0),
        ("Yes", "No", 0, 0, 0),
        ("0.50", "0.5", 0, 0, 1),
        (".5", "+5.0e-1", 0, 0, 1),
        ("1,000", "1000", 0, 0, 1),
        ("-0", "0", 0, 0, 1),
        ("1,00", "100", 0, 0, 0),
        ("1_0", "10", 0, 0, 0),
        ("١", "1", 0, 0, 0),
        ("0.5000000000000001", "0.5", 0, 0, 0),
        ("nan", "NaN", 0, 1, 0),
        ("0.5 cm", "0.50 cm", 0, 0, 0),
        ("", "0", 0, 0, 0),
    ],
)
def test_an_exact_match_may_ignore_case_and_compare_numbers(
    answer: str, label: str, exact: float, ignoring_case: float, numeric: float
) -> None:
    rules = (
        exact_match_rule(""),
        exact_match_rule("", ignore_case=True),
        exact_match_rule("", numeric=True),
        exact_match_rule("", ignore_case=True, numeric=True),
    )
    found = [rule(f" {answer}\n", label) for rule in rules]
    assert found == [exact, ignoring_case, numeric, max(exact, ignoring_case, numeric)]


def test_responses_vote_with_their_answers_and_those_without_one_do_not() -> None:
    prompt = Prompt((1,))
    answers = [said(text) for text in ("12+30=42", "25+17=042", "20+22=43", "17", "17", "17")]
    found = MajorityReward(Reasoning.plain(decode), 6, r"=(\d+)")([prompt] * 6, answers)
    assert [score["reward"] for score in found] == [1, 1, 0, 0, 0, 0]


def test_a_broken_pattern_is_refused_by_its_option() -> None:
    with pytest.raises(ConfigError, match=r"reward\.answer_pattern='\(' is no regular expression"):
        create(RewardConfig(answer_pattern="("), decode)
