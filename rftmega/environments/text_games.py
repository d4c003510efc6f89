"""TextGameEnvironment plays single-player games of TextArena, and uses environments of OpenEnv."""

import asyncio
import itertools
import json
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rftmega.config.options.parts import implements
from rftmega.config.options.text_games import OpenEnv, TextArena
from rftmega.core.errors import ConfigError, ContextTooLong, DataError, InfrastructureFault
from rftmega.core.interfaces import Model
from rftmega.core.types import Prompt, Rollout
from rftmega.data.chat.conversation import Conversation
from rftmega.data.chat.renderer import ConversationRenderer
from rftmega.environments.agents.threads import in_thread
from rftmega.environments.agents.verifiers import Worker

WORKER = Path(__file__).with_name("text_game_worker.py")
REWARD = "game"  # name of the reward that a game gives


@implements(OpenEnv)
@implements(TextArena)
class TextGameEnvironment:
    """TextGameEnvironment plays one game per rollout: what the game shows is a user message, and a
    completion is a move. The reward "game" is the game's own.
    """

    def __init__(self, options: TextArena | OpenEnv, tokenizer: Any):
        self.options = options
        self.renderer = ConversationRenderer.of(tokenizer, options.renderer)
        self.stop_ids: Sequence[int] = self.renderer.stop_ids
        self._worker: Worker | None = None
        self._starting: asyncio.Lock | None = None
        self._rollouts = itertools.count()

    def check(self, task: Prompt) -> None:
        """Raises DataError for a prompt that is no game, and ConfigError if the game can't be
        started in environment.python.
        """
        command = [*self.command("check"), json.dumps(self._game_of(task))]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=self.options.start_seconds
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"environment.python={self.options.python}: {error}.") from error
        if done.returncode or done.stdout:
            why = done.stdout or done.stderr.strip()[-400:]
            raise ConfigError(f"environment.type={self.options.type}, {self.options.python}: {why}")

    async def run(self, task: Prompt, model: Model) -> Rollout:
        """Plays the game of a task. Raises InfrastructureFault if its process fails."""
        worker, rollout = await self._ready(), str(next(self._rollouts))
        try:
            begun = await self._asked(worker, {"rollout": rollout, "task": self._game_of(task)})
            if "error" in begun:
                raise InfrastructureFault(str(begun["error"]))
            conversation = self._conversation(begun["observation"])
            last = await self._play(conversation, model, worker, rollout)
        finally:
            with suppress(InfrastructureFault):  # the process is gone, and the game with it
                await self._asked(worker, {"rollout": rollout})
        measures = {
            "turns": float(conversation.turns),
            "finished": float(last["done"]),
            "invalid_move": float(last["invalid"]),
            "control_tokens": float(conversation.control_tokens),
        }
        trajectories = conversation.trajectories()
        if not last["done"]:
            trajectories[-1] = replace(trajectories[-1], truncated=True)
        return Rollout(tuple(trajectories), rewards={REWARD: last["reward"]}, measures=measures)

    async def close(self) -> None:
        """Stops the process of the games."""
        if self._worker is not None:
            await in_thread(self._worker.close)

    async def _play(
        self, conversation: Conversation, model: Model, worker: Worker, rollout: str
    ) -> dict[str, Any]:
        """Plays until the game is over, or a limit is reached. Returns the game's last reply."""
        told: dict[str, Any] = {"done": False, "reward": 0.0, "invalid": False}
        while True:
            try:
                completion = await model.generate(
                    conversation.context, max_tokens=self.options.max_turn_tokens or None
                )
            except ContextTooLong:
                if not conversation.turns:
                    raise
                return told
            reply = conversation.answered(completion)
            if not reply.complete:
                return told
            action = str(self.renderer.message(reply).get("content") or "")
            told = await self._asked(worker, {"rollout": rollout, "action": action})
            if "error" in told:
                raise InfrastructureFault(str(told["error"]))
            if told["done"] or conversation.turns == self.options.max_turns:
                return told
            conversation.reply([{"role": "user", "content": told["observation"]}])

    def _conversation(self, observation: str) -> Conversation:
        messages = [{"role": "user", "content": observation}]
        hidden = self.renderer.tokenizer.control.hidden(messages, words=True)
        return Conversation(self.renderer.render(hidden), self.renderer, messages=hidden)

    async def _asked(self, worker: Worker, fields: dict[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self.options.seconds):
                return await worker.ask(fields)
        except TimeoutError as error:
            await in_thread(worker.close)  # one game holds up all others
            raise InfrastructureFault(
                f"a reply of {self.options.type} took over {self.options.seconds:g} s (environment.seconds)"
            ) from error

    async def _ready(self) -> Worker:
        """Returns the process of the games; starts a new one if none is running."""
        if self._starting is None:
            self._starting = asyncio.Lock()
        async with self._starting:
            if self._worker is None or not self._worker.alive:
                command, library = self.command("play"), self.options.type
                self._worker = await in_thread(Worker, command, self.options.start_seconds, library)
            return self._worker

    def command(self, what: str) -> list[str]:
        """Returns the command of the process that plays (`what`: play), or checks a game (check)."""
        return [self.options.python, str(WORKER), self.options.type, what]

    def _game_of(self, task: Prompt) -> dict[str, Any]:
        """Returns the game of a task as the process takes it. Raises DataError if there is none."""
        record, library = json.loads(task.record) if task.record else {}, self.options.type
        game = record.get("task")
        if not isinstance(game, dict) or not {"game", "seed", "parameters"} <= game.keys():
            raise DataError(
                f"prompt {task.index} is no game of {library}: set data.train={library}://GAME?size=500 (docs/tasks.md)."
            )
        if isinstance(self.options, OpenEnv):
            keys = {name: getattr(self.options, name) for name in ("action_key", "observation_key")}
            return game | keys
        return game
