"""What does not go with answers that are learnt from later."""

import pytest

from rftmega.config import RunConfig
from rftmega.config.validation.asynchronous import asynchronous


def reasons(strategy: str, **rollout: object) -> list[str]:
    config = RunConfig()
    config.strategy = strategy  # type: ignore[assignment]
    config.trainer.max_staleness = 1
    for name, value in rollout.items():
        setattr(config.rollout, name, value)
    return asynchronous(config)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        (
            "engine",
            "transformers",
            "trainer.max_staleness=1 with strategy=colocated interrupts completions",
        ),
        ("ahead", 1, "rollout.ahead=1 needs strategy=separate"),
        ("on_update", "keep", "rollout.on_update=keep needs strategy=separate"),
        ("on_update", "wait", "rollout.on_update=wait needs strategy=separate"),
        ("stop", ["END"], "rollout.stop=['END'] does not go with trainer.max_staleness"),
    ],
)
def test_what_colocated_engines_can_not_is_refused_and_servers_can(
    option: str, value: object, said: str
) -> None:
    found = reasons("colocated", **{option: value})
    assert any(each.startswith(said) for each in found), found
    refused = "needs strategy=separate", "does not go with", "interrupts completions off"
    assert not any(
        word in each for each in reasons("separate", **{option: value}) for word in refused
    )


def test_rollouts_of_colocated_engines_may_go_on_in_the_next_step() -> None:
    assert reasons("colocated") == []
