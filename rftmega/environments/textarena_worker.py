"""Plays games of the library TextArena, in a Python that has it installed:

    PYTHON textarena_worker.py check TASK    # starts the game once; prints "" or what is wrong
    PYTHON textarena_worker.py play          # what rftmega starts

TASK is JSON, {"game", "seed", "parameters"}. The first line that `play` writes is {"ready": true}.
A line on its standard input is a request, {"id", "rollout", "task"} to begin a game, {"id",
"rollout", "action"} for a move, or {"id", "rollout"} to end it; a line on its standard output is
the reply, {"id", "observation", "done", "reward", "invalid"} or {"id", "error"}. This file imports
nothing of rftmega.
"""

import difflib
import json
import os
import random
import sys
from pathlib import Path
from typing import Any, TextIO

HERE = Path(__file__).resolve().parent


class GameRefused(Exception):
    """Raised for a game that can't be started; the message says why."""


class Game:
    """Game is one game in progress. TextArena draws from Python's global random numbers, so each
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

    def _new_text(self) -> str:
        """Returns what the game shows beyond what it showed before."""
        _, text = self.game.get_observation()
        text = str(text)
        before, self.shown = self.shown, text
        return text.removeprefix(before).strip()


def _reply(
    observation: str, *, done: bool = False, reward: float = 0.0, invalid: bool = False
) -> dict[str, Any]:
    return {"observation": observation, "done": done, "reward": reward, "invalid": invalid}


def replied(games: dict[str, Game], asked: dict[str, Any]) -> dict[str, Any]:
    """Returns the reply to a request (see this module); `games`: the games in progress."""
    rollout = asked["rollout"]
    if "task" in asked:
        try:
            games[rollout] = Game(asked["task"])
        except GameRefused as error:
            return {"error": str(error)}
        return _reply(games[rollout].observation)
    if "action" in asked:
        return games[rollout].move(asked["action"])
    games.pop(rollout, None)
    return _reply("", done=True)


def play(out: TextIO) -> None:
    """Answers requests on standard input until it is closed."""
    import textarena  # noqa: F401  before the first request

    games: dict[str, Game] = {}

    def say(fields: dict[str, Any]) -> None:
        out.write(json.dumps(fields) + "\n")
        out.flush()

    say({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        say({"id": asked["id"], **replied(games, asked)})


def main(what: str, task: str = "{}") -> None:
    # a file in this folder has the library's name
    sys.path[:] = [each for each in sys.path if Path(each or ".").resolve() != HERE]
    # prints of a game go to the log: standard output carries replies
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if what == "play":
        play(out)
        return
    try:
        Game(json.loads(task))
    except GameRefused as error:
        out.write(str(error))
    except ImportError as error:
        out.write(f"{error}. Run\n    {sys.executable} -m pip install textarena")
    out.flush()


if __name__ == "__main__":
    main(*sys.argv[1:3])
