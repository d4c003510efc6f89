"""Plays games of the library TextArena, or uses environments of OpenEnv, in a Python that has the
library installed:

    PYTHON text_game_worker.py LIBRARY check TASK    # starts the game; writes "" or what is wrong
    PYTHON text_game_worker.py LIBRARY play          # what rftmega starts

LIBRARY is textarena or openenv, TASK is JSON, {"game", "seed", "parameters"}; for OpenEnv, the game
is the address of a server, and "action_key" and "observation_key" name fields. The first line that
`play` writes is {"ready": true}. A line on its standard input is a request, {"id", "rollout",
"task"} to begin a game, {"id", "rollout", "action"} for a move, or {"id", "rollout"} to end it; a
line on its standard output is the reply, {"id", "observation", "done", "reward", "invalid"} or
{"id", "error"}. This file imports nothing of rftmega.
"""

import contextlib
import difflib
import importlib
import json
import os
import random
import sys
from typing import Any, TextIO


class GameRefused(Exception):
    """Raised for a game that can't be started; the message says why."""


class TextArenaGame:
    """TextArenaGame is one game in progress. TextArena draws from Python's global random numbers, so each
    game keeps its own state of them.
    """

    def __init__(self, task: dict[str, Any]):
        import textarena
        from textarena.envs.registration import ENV_REGISTRY

        name = task["game"]
        if name not in ENV_REGISTRY:
            near = difflib.get_close_matches(name, ENV_REGISTRY, n=3)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise GameRefused(f"{name!r} is no game of TextArena.{hint}")
        try:
            self.game = textarena.make(name, **task["parameters"])
            self.game.reset(num_players=1, seed=task["seed"])
            self.shown = ""
            self.observation = self._new_text()
        except Exception as error:  # of the game, of any type
            said = f"{type(error).__name__}: {str(error).strip()[:200]}"
            raise GameRefused(f"{name} can't be started for one player: {said}") from error
        self.random = random.getstate()

    def move(self, action: str) -> dict[str, Any]:
        """Makes a move and returns the reply to it. If the game raises an exception, it is over with
        reward 0: a completion may contain anything.
        """
        random.setstate(self.random)
        try:
            done, _ = self.game.step(action)
            if done:
                rewards, info = self.game.close()
                invalid = bool(info.get(0, {}).get("invalid_move"))
                return _reply(
                    "", done=True, reward=float((rewards or {}).get(0) or 0.0), invalid=invalid
                )
            return _reply(self._new_text())
        except Exception as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            return _reply("", done=True, invalid=True)
        finally:
            self.random = random.getstate()

    def close(self) -> None:
        """Needs nothing: the game has no connection."""

    def _new_text(self) -> str:
        """Returns what the game shows beyond what it showed before."""
        _, text = self.game.get_observation()
        text = str(text)
        before, self.shown = self.shown, text
        return text.removeprefix(before).strip()


class OpenEnvGame:
    """OpenEnvGame is a session at a server of OpenEnv. A completion is the field `action_key` of an
    action; the reward is the sum of the rewards of all steps.
    """

    def __init__(self, task: dict[str, Any]):
        from openenv.core.generic_client import GenericEnvClient

        game = task["game"]
        address = game if "://" in game else f"http://{game}"
        self.action_key, self.observation_key = task["action_key"], task["observation_key"]
        self.reward = 0.0
        try:
            self.client = GenericEnvClient(base_url=address).sync()
            self.client.connect()
            begun = self.client.reset(seed=task["seed"], **task["parameters"])
            self.observation = self._text(begun.observation)
        except GameRefused:
            raise
        except Exception as error:  # of the client or the server, of any type
            said = f"{type(error).__name__}: {str(error).strip()[:200]}"
            raise GameRefused(f"the environment at {address} can't be started: {said}") from error

    def move(self, action: str) -> dict[str, Any]:
        """Takes a step and returns the reply to it. If the server refuses the action, the rollout is
        over. An unreachable server is an error.
        """
        try:
            result = self.client.step({self.action_key: action})
            self.reward += float(result.reward or 0.0)
            return _reply(
                self._text(result.observation), done=bool(result.done), reward=self.reward
            )
        except RuntimeError as error:  # the server's reply
            sys.stderr.write(f"{error}\n")
            return _reply("", done=True, reward=self.reward, invalid=True)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def close(self) -> None:
        """Ends the session."""
        with contextlib.suppress(Exception):
            self.client.close()

    def _text(self, observation: dict[str, Any]) -> str:
        """Returns what the model is shown of an observation. Raises GameRefused if it lacks the
        field.
        """
        if not self.observation_key:
            return json.dumps(observation)
        if self.observation_key not in observation:
            raise GameRefused(
                f"the observation has no {self.observation_key!r}, but {', '.join(sorted(observation))} "
                "(environment.observation_key)"
            )
        return str(observation[self.observation_key])


GAMES: dict[str, Any] = {"textarena": TextArenaGame, "openenv": OpenEnvGame}
PACKAGES = {"textarena": "textarena", "openenv": "openenv-core"}


def _reply(
    observation: str, *, done: bool = False, reward: float = 0.0, invalid: bool = False
) -> dict[str, Any]:
    return {"observation": observation, "done": done, "reward": reward, "invalid": invalid}


def replied(kind: Any, games: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Returns the reply to a request (see this module); `kind`: class of the games, `games`: those
    in progress.
    """
    rollout = asked["rollout"]
    if "task" in asked:
        try:
            games[rollout] = kind(asked["task"])
        except GameRefused as error:
            return {"error": str(error)}
        return _reply(games[rollout].observation)
    if "action" in asked:
        reply: dict[str, Any] = games[rollout].move(asked["action"])
        return reply
    if (ended := games.pop(rollout, None)) is not None:
        ended.close()
    return _reply("", done=True)


def play(library: str, out: TextIO) -> None:
    """Answers requests on standard input until it is closed."""
    importlib.import_module(library)  # before the first request
    games: dict[str, Any] = {}

    def say(fields: dict[str, Any]) -> None:
        out.write(json.dumps(fields) + "\n")
        out.flush()

    say({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        say({"id": asked["id"], **replied(GAMES[library], games, asked)})


def main(library: str, what: str, task: str = "{}") -> None:
    # prints of a game go to the log: standard output carries replies
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if what == "play":
        play(library, out)
        return
    try:
        GAMES[library](json.loads(task)).close()
    except GameRefused as error:
        out.write(str(error))
    except ImportError as error:
        out.write(f"{error}. Run\n    {sys.executable} -m pip install {PACKAGES[library]}")
    out.flush()


if __name__ == "__main__":
    main(*sys.argv[1:4])
