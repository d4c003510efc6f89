import pytest

from rftmega.rewards.multiple_choice import chosen_letter, multiple_choice


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"),
        (" (b).\n", "B"),
        ("Answer: B", "B"),
        ("**Answer:** **B**", "B"),
        ("answer: b", "B"),
        ("The answer is (B), because A lacks it.", "B"),
        ("The correct choice is option B", "B"),
        (r"So \boxed{B}", "B"),
        (r"So $\boxed{\text{(B)}}$.", "B"),
        ("I looked at (A) first, but it is (B)", "B"),
        ("B. Paris", "B"),
        ("Think.\nB) Paris", "B"),
        ("It can only be B.", "B"),
        ("Answer: A\nNo, wait.\nAnswer: B", "B"),
        (r"\boxed{A} was wrong. Answer: B", "B"),
        ("Answer: B\nThe others, such as (A), fail.", "B"),  # a statement outweighs a later mention
        ("", None),
        ("Paris", None),
        ("A good question: a bee.", None),
        ("The answer is a number", None),
        ("The answer is Berlin", None),
        ("Answer: B or C", None),
        ("Answer: (B), (C)", None),
        ("It is (B) or (C)", None),
        (r"\boxed{B, C}", None),
        (r"Answer: A, I thought; \boxed{12}", None),
    ],
)
def test_the_last_stated_letter_counts_and_doubt_does_not(
    response: str, letter: str | None
) -> None:
    assert chosen_letter(response) == letter
    assert [multiple_choice(response, label) for label in ("B", "b ", "C")] == [
        float(letter == "B")
    ] * 2 + [0.0]
