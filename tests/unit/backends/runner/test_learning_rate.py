"""The learning rate of each step is that of Megatron's own schedule."""

from types import SimpleNamespace

import pytest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from rftmega.backends.runner.learning_rate import learning_rate
from rftmega.config import OptimizerConfig


def megatrons(chosen: OptimizerConfig, steps: int, count: int) -> list[float]:
    """The rates of the first `count` steps of `steps`, as a run under Megatron has them."""
    group = {"params": [], "is_expert": False, "lr": 0.0}
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=0.0,
        max_lr=chosen.learning_rate,
        min_lr=chosen.min_learning_rate,
        lr_warmup_steps=chosen.warmup_steps,
        lr_decay_steps=steps + 1,
        lr_decay_style=chosen.schedule,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    found = []
    for _ in range(count):
        scheduler.step(increment=1)
        found.append(float(group["lr"]))
    return found


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 9), (3, 9), (9, 10)])
def test_the_learning_rate_is_that_of_megatrons_scheduler(
    schedule: str, warmup: int, steps: int
) -> None:
    chosen = OptimizerConfig(
        learning_rate=1e-3, min_learning_rate=1e-4, schedule=schedule, warmup_steps=warmup
    )
    wanted = megatrons(chosen, steps, steps + 4)
    found = [learning_rate(chosen, step, steps=steps) for step in range(1, steps + 5)]
    assert found == pytest.approx(wanted, rel=1e-12)
