"""Games of TextArena and environments of OpenEnv run in a process of their own, one move per completion."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rftmega import config as configuration
from rftmega.config import RunConfig
from rftmega.config.options.text_games import OpenEnv, TextArena
from rftmega.config.validation.environment import environment as problems
from rftmega.core.errors import ConfigError, DataError, InfrastructureFault
from rftmega.core.types import Prompt, Rollout
from rftmega.data.records import records
from rftmega.environments.text_games import TextGameEnvironment
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

CLIENT = """
from types import SimpleNamespace as Result
class GenericEnvClient:
    def __init__(self, base_url):
        self.base_url = base_url
    def sync(self):
        return self
    def connect(self):
        assert self.base_url == "http://host:8000", self.base_url
    def reset(self, seed, most):
        self.right = str(seed % most)
        return Result(observation={"text": f"Guess 0 to {most}."}, reward=0.0, done=False)
    def step(self, action):
        if action["guess"] == "refused":
            raise RuntimeError("Server error: no guess")
        if action["guess"] == "lost":
            raise ConnectionError("gone")
        right = action["guess"] == self.right
        return Result(observation={"text": "no"}, reward=1.0 if right else -0.25, done=right)
    def close(self):
        pass
"""


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plays games at once, each with its completions, and returns rollouts or errors, and models."""
    package = tmp_path / "library/textarena"
    (package / "envs").mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE)
    (package / "envs/registration.py").write_text("ENV_REGISTRY = {'Guess-v0': 1}\n")
    client = tmp_path / "library/openenv/core"
    client.mkdir(parents=True)
    (client / "generic_client.py").write_text(CLIENT)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))

    def played(games: list[tuple[dict[str, Any], list[str]]], **options: Any) -> Any:
        kind = OpenEnv if "action_key" in options else TextArena
        chosen = kind(**{"python": sys.executable, "start_seconds": 60.0} | options)
        environment = TextGameEnvironment(chosen, tokenizer(tmp_path / "model", FORM))
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


GUESSES = {"action_key": "guess", "observation_key": "text"}


def at(address: str, seed: int) -> dict[str, Any]:
    return {"game": address, "seed": seed, "parameters": {"most": 5}}


def test_rewards_of_an_openenv_server_add_up_and_a_lost_server_is_a_fault(play: Any) -> None:
    end = "<|im_end|>"
    (found, refused, lost), (model, *_), environment = play(
        [
            (at("host:8000", 8), [f"1{end}", f"3{end}"]),
            (at("host:8000", 8), [f"1{end}", f"refused{end}"]),
            (at("host:8000", 8), [f"lost{end}"]),
        ],
        **GUESSES,
    )
    assert found.rewards == {"game": 0.75} and found.measures["finished"] == 1.0
    assert "Guess 0 to 5." in text_of(model, 0) and "no" in text_of(model, 1)
    assert refused.rewards == {"game": -0.25} and refused.measures["invalid_move"] == 1.0
    assert isinstance(lost, InfrastructureFault) and "gone" in str(lost)


def test_a_server_that_can_not_be_reached_or_shows_no_such_field_is_told_before_the_run(
    play: Any,
) -> None:
    _, _, environment = play([], **GUESSES)
    environment.check(prompt_of(at("host:8000", 8)))
    with pytest.raises(ConfigError, match="http://other:1 can't be started"):
        environment.check(prompt_of(at("other:1", 8)))
    _, _, environment = play([], **{**GUESSES, "observation_key": "board"})
    with pytest.raises(ConfigError, match="no 'board', but text"):
        environment.check(prompt_of(at("host:8000", 8)))


def test_an_unknown_game_or_parameter_is_told_before_the_run(play: Any) -> None:
    _, _, environment = play([])
    environment.check(prompt_of(game(most=5)))
    with pytest.raises(ConfigError, match="is no game of TextArena. Did you mean Guess-v0"):
        environment.check(prompt_of({**game(), "game": "Gess-v0"}))
    with pytest.raises(ConfigError, match="can't be started for one player: TypeError"):
        environment.check(prompt_of(game(least=5)))
    with pytest.raises(DataError, match="prompt 0 is no game of textarena"):
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


SERVER = """
import sys, uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
class Guess(Action):
    guess: str
class Told(Observation):
    text: str = ""
class Game(Environment):
    def reset(self, seed=None, episode_id=None, most=3, **others):
        self.right = str(seed % most)
        return Told(text=f"Guess 0 to {most}.")
    def step(self, action, timeout_s=None, **others):
        right = action.guess == self.right
        return Told(text="no", reward=1.0 if right else -0.25, done=right)
    @property
    def state(self):
        return State()
uvicorn.run(create_app(Game, Guess, Told), host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


def installed(folder: Path, requirement: str) -> Path:
    """The Python of a new virtual environment with a package. Skips where it can't be installed."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin/python"
    pip = [str(python), "-m", "pip", "install", "-q", requirement]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{requirement} can't be installed: {done.stderr[-300:]}")
    return python


def played_by(environment: TextGameEnvironment, task: Prompt, texts: list[str]) -> Rollout:
    async def run() -> Rollout:
        try:
            return await environment.run(task, Scripted(environment.renderer.tokenizer, texts))
        finally:
            await environment.close()

    return asyncio.run(run())


@pytest.mark.ranks
def test_textarena_itself_plays(tmp_path: Path) -> None:
    python = installed(tmp_path / "venv", "textarena==0.7.4")
    options = TextArena(python=str(python))
    environment = TextGameEnvironment(options, tokenizer(tmp_path / "model", FORM))
    task = prompt_of({"game": "GuessTheNumber-v0", "seed": 3, "parameters": {"max_number": 2}})
    environment.check(task)
    found = played_by(environment, task, ["[1]<|im_end|>", "[2]<|im_end|>"])
    assert found.rewards == {"game": 1.0}


@pytest.mark.ranks
def test_a_server_of_openenv_itself_is_played_with(tmp_path: Path) -> None:
    python = installed(tmp_path / "venv", "openenv-core==0.3.0")
    (tmp_path / "server.py").write_text(SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([python, tmp_path / "server.py", str(port)])
    try:
        options = OpenEnv(python=str(python), **GUESSES)
        environment = TextGameEnvironment(options, tokenizer(tmp_path / "model", FORM))
        task = prompt_of(at(f"127.0.0.1:{port}", 8))
        for _ in range(60):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(1.0)
        environment.check(task)
        found = played_by(environment, task, ["1<|im_end|>", "3<|im_end|>"])
    finally:
        server.kill()
        server.wait()
    assert found.rewards == {"game": 0.75}
