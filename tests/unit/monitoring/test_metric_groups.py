"""Every metric has its place in a dashboard."""

import re
from pathlib import Path

import pytest

from rftmega.monitoring.metric_groups import GROUPS, group_of, grouped_metrics

DOCUMENTED = (Path(__file__).parents[3] / "docs/monitoring.md").read_text()


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("reward_mine", "rollout"),
        ("reward_math_undecided", "rollout"),
        ("staleness", "rollout"),
        ("staleness_3", "rollout"),
        ("groups_dropped", "rollout"),
        ("replay_rows", "rollout"),
        ("rollouts_lost", "rollout"),
        ("critic_grad_norm", "train"),
        ("critic_padding", "perf"),
        ("seconds_update", "perf"),
        ("server_0_tokens", "perf"),
        ("a_loss_of_my_own", "train"),
        ("rewarding", "train"),
    ],
)
def test_a_metric_is_in_its_group_and_an_unknown_one_with_the_training(
    name: str, group: str
) -> None:
    assert grouped_metrics({name: 1.0}) == {f"{group}/{name}": 1.0}


def test_the_group_replaces_the_prefix_of_an_evaluation() -> None:
    assert grouped_metrics({"eval_easy_math": 0.5}) == {"eval/easy_math": 0.5}


def test_exactly_one_group_knows_each_documented_metric() -> None:
    _, rest = DOCUMENTED.split("## Metrics\n")
    listed = rest.split("\nOperations are those")[0]
    heads = re.findall(r"^- (`[^:]*`)", listed, re.MULTILINE)
    names = [name for head in heads for name in re.findall(r"`([a-z0-9_<>]+)`", head)]
    assert len(names) > 60
    for name in names:
        known = [
            group
            for group, own in GROUPS.items()
            if own.fullmatch(name.replace("<", "").replace(">", ""))
        ]
        assert known == [group_of(name.replace("<", "").replace(">", ""))], name
