"""A user's own parts, from a file outside the package, through train_rl.py's own loading, checks
and run.
"""

import json
import pickle
import sys
from pathlib import Path

import pytest

from rftmega.config import load, plugins_of, without_secrets
from rftmega.config.validation import violations
from rftmega.core.errors import ConfigError
from rftmega.run import command_line
from rftmega.run.option_reference import option_reference
from tests.tiny_models import save_tiny
from tests.unit.config.observed import program

PARTS = '''
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from rftmega.config.options.parts import Advantage, PolicyLoss, RewardPart, implements


@dataclass(frozen=True)
class Scaled(Advantage):
    """Rewards times a number."""

    type: Literal["scaled"] = "scaled"

    factor: Annotated[float, Ge(0)] = 2.0
    """What rewards are multiplied by."""


@implements(Scaled)
def scaled(batch, options):
    return options.factor * batch.reward


@dataclass(frozen=True)
class Square(PolicyLoss):
    """A loss without a clip."""

    type: Literal["square"] = "square"

    pull: Annotated[float, Ge(0)] = 0.5
    """Weight of the squared log-ratio."""


@implements(Square)
def square(log_ratio, advantage, mask, options):
    return -advantage * log_ratio + options.pull * log_ratio**2


@dataclass(frozen=True)
class Brevity(RewardPart):
    """Short answers are better."""

    type: Literal["brevity"] = "brevity"

    longest: Annotated[int, Ge(1)] = 10
    """Letters above which an answer gets nothing."""


@implements(Brevity)
def brevity(completions, options, **columns):
    return [max(0.0, 1 - len(answer) / options.longest) for answer in completions]
'''
CHOSEN = (
    "algorithm.advantage={type: scaled, factor: 3}",
    "algorithm.policy_loss=square",
    "reward.custom.brevity.weight=0.5",
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "my_parts.py").write_text(PARTS)
    (tmp_path / "train.jsonl").write_text(
        "\n".join(json.dumps({"prompt": "abc"[: 1 + i % 3], "label": "1"}) for i in range(6))
    )
    path = tmp_path / "run.yaml"
    path.write_text(f"""
plugins: [{tmp_path / "my_parts.py"}]
model: {{path: {save_tiny(tmp_path / "model", "qwen3")}, dtype: float32}}
data: {{train: {tmp_path / "train.jsonl"}}}
algorithm: {{updates_per_epoch: 2}}
rollout: {{engine: scripted, samples_per_prompt: 4, max_prompt_tokens: 8, max_response_tokens: 4}}
trainer: {{steps: 2, prompts_per_step: 2, max_tokens_per_micro_batch: 48, trajectories: 0, output: {tmp_path}/out}}
""")
    return path


def test_a_run_learns_by_parts_of_a_users_own(run: Path) -> None:
    config = load(run, CHOSEN)
    assert violations(config, 1) == []
    seen = program(config)
    assert not [x for x in seen if x[0] == "error"], seen
    (metrics,) = [x[1] for x in seen if str(x[0]).endswith("metrics.jsonl")]
    assert all("reward_brevity" in step for step in metrics if "reward" in step)
    for other in (
        "algorithm.advantage.factor=1",
        "algorithm.policy_loss.pull=3",
        "reward.custom.brevity.longest=2",
    ):
        assert program(load(run, [*CHOSEN, other])) != seen, f"{other} changes nothing"


def test_their_options_are_checked_as_built_in_ones(run: Path) -> None:
    found = violations(
        load(run, [*CHOSEN, "algorithm.advantage.factor=-1", "reward.custom.brevity.longest=0"]), 1
    )
    assert "algorithm.advantage.factor=-1.0 must be at least 0." in found
    assert "reward.custom.brevity.longest=0 must be at least 1." in found
    for override, told in (
        ("algorithm.advantage.factr=1", "Did you mean algorithm.advantage.factor?"),
        ("algorithm.policy_loss.pull=x", "algorithm.policy_loss.pull='x' must be a number."),
        ("algorithm.advantage=sclaed", "Did you mean scaled?"),
        ("reward.custom.brevety.weight=1", "Did you mean reward.custom.brevity.weight?"),
    ):
        with pytest.raises(ConfigError) as raised:
            load(run, [*CHOSEN, override])
        assert told in str(raised.value)
    (unread,) = violations(load(run, ["reward.custom.brevity.longest=3"]), 1)
    assert "reward.custom.brevity.longest=3 needs a weight of that part" in unread


def test_a_reward_of_ones_own_may_be_weighed_by_kind(run: Path) -> None:
    config = load(run, ["reward.recipe={a: {brevity: 1, exact_match: 1}}"])
    assert violations(config, 1) == []
    assert config.reward.used() == {"brevity", "exact_match"}


def test_a_config_with_them_is_stored_shown_and_goes_to_other_processes(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(run, CHOSEN)
    stored = json.loads(json.dumps(without_secrets(config)))
    assert stored["algorithm"]["advantage"] == {"type": "scaled", "factor": 3.0}
    assert stored["reward"]["custom"] == {
        "brevity": {"weight": 0.5, "type": "brevity", "longest": 10}
    }
    sent = pickle.dumps(config)
    name = type(config.algorithm.advantage).__module__
    assert name.encode() not in sent, "a process that has not read the file can't import it"
    assert pickle.loads(sent) == config
    told = option_reference(plugins_of(run))
    for line in (
        "algorithm.advantage.factor = 2.0",
        "What rewards are multiplied by.",
        "reward.custom.brevity.weight = 0.0",
    ):
        assert line in told
    monkeypatch.setattr(sys, "argv", ["train_rl.py", "--help", str(run)])
    assert "algorithm.policy_loss.pull = 0.5" in command_line.reference(sys.argv[1:])


def test_without_the_file_there_are_no_such_parts(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.advantage\.type=scaled is unknown"):
        load(run, ["plugins=[]", CHOSEN[0]])
    assert load(run).algorithm.advantage.type == "group_norm"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "there is no file"),
        ("import nowhere_to_be_found", "can't be read: ModuleNotFoundError"),
        ("x = (", "can't be read: SyntaxError"),
        ("x = 1", "has no part: no dataclass that inherits from one of Advantage, PolicyLoss"),
        (PARTS.replace("@implements(Square)", ""), "Square has no function. Write @implements(Square) above one."),
        (PARTS.replace(' = "scaled"', ""), "Scaled has no type"),
        (PARTS.replace("scaled", "gae"), "has a part of type gae, which is built in already"),
        (PARTS.replace("float, Ge(0)] = 0.5", "complex, Ge(0)] = 0.5"), "Square.pull must be a number, true or false"),
        (PARTS.replace("class Scaled(", "class Scaled(", 1).replace("@dataclass(frozen=True)\nclass Scaled", "class Scaled"),
         "Scaled is no dataclass"),
        (PARTS.replace("@implements(Scaled)", "@implements(int)"), "can't be read: TypeError: int is no part"),
    ],
)  # fmt: skip
def test_a_file_that_is_missing_or_broken_is_a_clear_error(
    text: str | None, told: str, run: Path
) -> None:
    file = run.with_name("my_parts.py")
    file.unlink()
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load(run)
    assert told in str(raised.value)
    assert "my_parts.py" in str(raised.value)
    with pytest.raises(ConfigError, match="plugins='x' must be a list of Python files"):
        load(run, ["plugins=x"])
