"""Games of TextArena are played in a process of their own, one move per completion."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rftmega import config as configuration
from rftmega.config import RunConfig
from rftmega.config.options.text_games import TextArena
from rftmega.config.validation.environment import environment as problems
from rftmega.core.errors import ConfigError, DataError, InfrastructureFault
from rftmega.core.types import Prompt, Rollout
from rftmega.data.records import records
from rftmega.environments.textarena import TextArenaEnvironment
from tests.chat_formats import FORMATS, tokenizer
from tests.unit.environments.agents.test_openai_endpoint import Scripted

FORM = FORMATS["hermes"]
FAKE = """
import random, time
class Guess:
    def __init__(self, most=9):
        self.most = most
    def reset(self, num_players, seed):
        assert num_players == 1
        random.seed(seed)
        self.text, self.moves = f"Guess 1 to {self.most}.", 0
    def get_observation(self):
        return 0, self.text
    def step(self, action):
        self.moves += 1
        self.right = action == "4"
        if action == "sleep":
            time.sleep(60)
        self.text += f" Not {int(action)}. Luck {random.randrange(1000)}."
        return self.right, {}
    def close(self):
        return {0: 1.0}, {0: {"invalid_move": False}}
def make(name, **parameters):
    return Guess(**parameters)
"""


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plays games at once, each with its completions, and returns rollouts or errors, and models."""
    package = tmp_path / "library/textarena"
    (package / "envs").mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE)
    (package / "envs/registration.py").write_text("ENV_REGISTRY = {'Guess-v0': 1}\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))

    def played(games: list[tuple[dict[str, Any], list[str]]], **options: Any) -> Any:
        chosen = TextArena(**{"python": sys.executable, "start_seconds": 60.0} | options)
        environment = TextArenaEnvironment(chosen, tokenizer(tmp_path / "model", FORM))
        models = [Scripted(environment.renderer.tokenizer, texts) for _, texts in games]

        async def run() -> list[Any]:
            rollouts = [
                environment.run(prompt_of(game), model)
                for (game, _), model in zip(games, models, strict=True)
            ]
            try:
                return await asyncio.gather(*rollouts, return_exceptions=True)
            finally:
                await environment.close()

        return asyncio.run(run()), models, environment

    return played


def game(seed: int = 0, **parameters: Any) -> dict[str, Any]:
    return {"game": "Guess-v0", "seed": seed, "parameters": parameters}


def prompt_of(task: dict[str, Any]) -> Prompt:
    return Prompt((1,), record=json.dumps({"prompt": "x", "task": task}))


def text_of(model: Scripted, number: int) -> str:
    return str(model.tokenizer.decode(model.contexts[number]))


def test_a_game_is_a_conversation_and_its_reward_is_the_librarys(play: Any) -> None:
    (rollout,), (model,), _ = play([(game(), ["3<|im_end|>", "4<|im_end|>"])])
    assert isinstance(rollout, Rollout)
    assert rollout.rewards == {"game": 1.0}
    assert (rollout.measures["turns"], rollout.measures["finished"]) == (2.0, 1.0)
    assert "Guess 1 to 9." in text_of(model, 0)
    assert text_of(model, 1).count("Guess 1 to 9.") == 1, "only what is new is shown"
    assert "Not 3." in text_of(model, 1)
    (trajectory,) = rollout.trajectories
    assert sum(trajectory.loss_mask) == len(model.tokenizer.encode_reply("3<|im_end|>4<|im_end|>"))


def test_games_at_once_draw_as_each_does_alone(play: Any) -> None:
    texts = [f"{n}<|im_end|>" for n in (1, 2, 4)]
    _, alone, _ = play([(game(5), list(texts))])
    _, both, _ = play([(game(5), list(texts)), (game(6), list(texts))])
    assert alone[0].contexts == both[0].contexts
    assert both[0].contexts[1] != both[1].contexts[1]


def test_a_move_that_the_game_can_not_read_or_too_many_moves_score_0(play: Any) -> None:
    (broken, endless), _, _ = play(
        [(game(), ["no number<|im_end|>"]), (game(), ["1<|im_end|>", "2<|im_end|>"])],
        max_turns=2,
    )
    assert broken.rewards == {"game": 0.0} and broken.measures["invalid_move"] == 1.0
    assert endless.rewards == {"game": 0.0} and endless.measures["finished"] == 0.0
    assert endless.trajectories[-1].truncated


def test_a_completion_is_cut_at_the_turns_limit_and_ends_the_game(play: Any) -> None:
    (rollout,), (model,), _ = play([(game(), ["4<|im_end|>"])], max_turn_tokens=1)
    assert model.most == [1]
    assert rollout.rewards == {"game": 0.0} and rollout.measures["finished"] == 0.0


def test_a_game_that_hangs_is_a_fault_that_is_repeated(play: Any) -> None:
    (found,), _, _ = play([(game(), ["sleep<|im_end|>"])], seconds=1.0)
    assert isinstance(found, InfrastructureFault) and "over 1 s" in str(found)


def test_an_unknown_game_or_parameter_is_told_before_the_run(play: Any) -> None:
    _, _, environment = play([])
    environment.check(prompt_of(game(most=5)))
    with pytest.raises(ConfigError, match="is no game of TextArena. Did you mean Guess-v0"):
        environment.check(prompt_of({**game(), "game": "Gess-v0"}))
    with pytest.raises(ConfigError, match="can't be started for one player: TypeError"):
        environment.check(prompt_of(game(least=5)))
    with pytest.raises(DataError, match="prompt 0 is no game of TextArena"):
        environment.check(Prompt((1,), record='{"prompt": "x"}'))


def test_a_python_without_the_library_is_told_with_the_command(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, environment = play([])
    monkeypatch.delenv("PYTHONPATH")
    with pytest.raises(ConfigError, match="No module named 'textarena'.*\n.*-m pip install"):
        environment.check(prompt_of(game()))


def test_records_of_games_count_the_seeds_and_pass_the_other_parameters_on() -> None:
    found = [record for _, record in records("textarena://Guess-v0?size=2&seed=7&most=5&hard=True")]
    assert [each["task"]["seed"] for each in found] == [7, 8]
    assert found[0]["task"]["parameters"] == {"most": 5, "hard": True}
    with pytest.raises(DataError, match="size=two must be a whole number"):
        list(records("textarena://Guess-v0?size=two"))


def loaded(**environment: Any) -> RunConfig:
    data = {"train": "textarena://Guess-v0", "eval": "textarena://Guess-v0?seed=1000&size=5"}
    given = {"model": {"path": "model"}, "data": data, "environment": environment}
    return configuration.load(given)


def test_a_game_needs_its_environment_and_is_the_reward() -> None:
    (said,) = problems(loaded())
    assert "needs environment.type=textarena" in said
    config = loaded(type="textarena", python=sys.executable)
    assert problems(config) == [] and config.reward.used() == set()
    assert config.trainer.eval_accuracy == "game"
    (said,) = problems(loaded(type="textarena"))
    assert "environment.python=(empty) is no program" in said


@pytest.mark.ranks
def test_the_library_itself_plays(tmp_path: Path) -> None:
    """Skipped unless the package can be installed: in a virtual environment, as users do."""
    python = tmp_path / "venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    done = subprocess.run([python, "-m", "pip", "install", "-q", "textarena==0.7.4"], check=False)
    if done.returncode:
        pytest.skip("textarena can't be installed")
    environment = TextArenaEnvironment(
        TextArena(python=str(python)), tokenizer(tmp_path / "model", FORM)
    )
    task = prompt_of({"game": "GuessTheNumber-v0", "seed": 3, "parameters": {"max_number": 2}})
    environment.check(task)

    async def run() -> Rollout:
        model = Scripted(environment.renderer.tokenizer, ["[1]<|im_end|>", "[2]<|im_end|>"])
        try:
            return await environment.run(task, model)
        finally:
            await environment.close()

    assert asyncio.run(run()).rewards == {"game": 1.0}
