"""The list of bugs that tests must see (`make mutations` plants them) fits the code as it is."""

from tests.mutations import mutations, problems


def test_every_bug_of_the_list_can_be_planted_and_names_a_test_that_exists() -> None:
    found = [problem for each in mutations() for problem in problems(each)]
    assert found == []


def test_no_bug_is_listed_twice_and_none_is_without_a_reason() -> None:
    listed = mutations()
    assert len({(each.file, each.old, each.new) for each in listed}) == len(listed)
    assert all(each.note for each in listed)
