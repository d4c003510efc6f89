import json
from typing import Any

from rftmega.config import RunConfig, changes, without_secrets


def tree(config: RunConfig) -> dict[str, Any]:
    """As a checkpoint gives it back."""
    found: dict[str, Any] = json.loads(json.dumps(without_secrets(config)))
    return found


def test_what_differs_is_told_a_line_each_and_nothing_else() -> None:
    before, now = RunConfig(), RunConfig()
    for config in (before, now):
        config.model.path = "/model"
    assert changes(tree(before), without_secrets(now)) == []
    now.trainer.steps = 7
    now.checkpoint.folder = "/elsewhere"
    now.data.sources = {"a.jsonl": 2.0}
    now.logging.timeline = [1, 2]
    assert changes(tree(before), without_secrets(now)) == [
        'data.sources: {} -> {"a.jsonl": 2.0}',
        "trainer.steps: 100 -> 7",
        'checkpoint.folder: "" -> /elsewhere',
        "logging.timeline: [] -> [1, 2]",
    ]


def test_an_option_that_one_side_does_not_know_is_nothing_there() -> None:
    before = tree(RunConfig())
    before["trainer"]["an_old_one"] = True
    del before["faults"]["requeue_code"]
    assert changes(before, without_secrets(RunConfig())) == [
        "faults.requeue_code: (nothing) -> 75",
        "trainer.an_old_one: true -> (nothing)",
    ]


def test_the_critic_is_named_only_where_it_is_not_the_policys_change() -> None:
    before, now = RunConfig(), RunConfig()
    now.optimizer.learning_rate = now.critic.optimizer.learning_rate = 0.5
    now.critic.optimizer.beta1 = 0.8
    assert changes(tree(before), without_secrets(now)) == [
        "optimizer.learning_rate: 1e-06 -> 0.5",
        "critic.optimizer.beta1: 0.9 -> 0.8",
    ]


def test_what_an_older_checkpoint_says_of_a_secret_is_not_told() -> None:
    before = tree(RunConfig())
    before["reward"]["remote_url"] = "http://me:s3cr3t@host"
    assert changes(before, without_secrets(RunConfig())) == []
