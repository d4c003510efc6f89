from itertools import combinations

import pytest

from rftmega.monitoring.observers.evaluate import Answering
from rftmega.run.evaluation.results import (
    as_json,
    estimates,
    grouped,
    page_of,
    run_metrics,
    text_of,
)
from rftmega.run.evaluation.store import StoredCompletion


def completions(index: int, *drawn: tuple[float, str | None] | None) -> list[StoredCompletion]:
    """A prompt's completions with (exact match, answer); None: a lost one."""
    return [
        StoredCompletion(("", index, sample), {}, None, {}, "gone")
        if each is None
        else StoredCompletion(("", index, sample), {"exact_match": each[0]}, each[1], {}, "")
        for sample, each in enumerate(drawn)
    ]


PROMPTS = [
    completions(0, (1.0, "7"), (0.0, "8"), (1.0, "7")),
    completions(1, (0.0, "1"), (0.0, None), (0.0, "2")),
    completions(2, (1.0, "3"), None, (0.0, "4")),
]
ASKED = Answering(samples=3, pass_at=(2,))


def test_estimates_are_means_over_prompts_without_lost_completions() -> None:
    found = {name: each.mean for name, each in estimates(PROMPTS, ASKED).items()}
    assert found == pytest.approx(
        {
            "pass@1": (2 / 3 + 0 + 1 / 2) / 3,
            "avg@3 exact_match": (2 / 3 + 0 + 1 / 2) / 3,
            "pass@2": (1 + 0 + 1) / 3,
            "maj@2": (1 / 3 * 1 + 2 / 3 * 0.5 + 0 + 0.5) / 3,
            "pass@3": 0.5,
            "maj@3": 0.5,
        }
    )
    subsets = list(combinations((1, 0, 1), 2))
    assert sum(map(max, subsets)) / len(subsets) == 1


def test_metrics_are_those_of_a_run() -> None:
    found = run_metrics("hard", PROMPTS, ASKED)
    assert found == pytest.approx(
        {
            "eval_hard_exact_match": 3 / 8,
            "eval_hard_accuracy": 3 / 8,
            "eval_hard_pass_at_2": 2 / 3,
            "eval_hard_lost": 1 / 9,
        }
    )


def test_no_answers_mean_no_majority_and_no_scores_no_estimate() -> None:
    silent = [completions(0, (1.0, None), (0.0, None))]
    assert "maj@2" not in estimates(silent, Answering(samples=2))
    assert estimates([completions(0, None)], Answering()) == {}


def test_groups_and_models_are_told_and_names_are_escaped() -> None:
    groups = grouped(PROMPTS, lambda each: "<b>" if each.key[1] else "easy")
    assert {name: len(own) for name, own in groups.items()} == {"<b>": 2, "easy": 1}
    sets = {
        "": {
            "all": as_json(estimates(PROMPTS, ASKED)),
            "groups": {name: as_json(estimates(own, ASKED)) for name, own in groups.items()},
        }
    }
    models = [{"model": "policy", "folder": "x", "step": 3, "sets": sets}]
    text = text_of(models)
    assert "policy: all (3 prompts)" in text
    assert "policy: easy (1 prompts)" in text
    page = page_of("<i>", models)
    assert "<b>" not in page
    assert "<i>" not in page
    assert "&lt;b&gt;" in page
