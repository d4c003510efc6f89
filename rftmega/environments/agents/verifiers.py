"""VerifiersEnvironment runs tasks in environments of the verifiers library."""

import asyncio
import itertools
import json
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rftmega.config.options.agents import Verifiers
from rftmega.config.options.parts import implements
from rftmega.core.errors import ConfigError, DataError, InfrastructureFault
from rftmega.core.interfaces import Model
from rftmega.core.types import Prompt, Rollout
from rftmega.data.chat.renderer import ConversationRenderer
from rftmega.environments.agents.openai_endpoint import MODEL, Endpoint
from rftmega.environments.agents.session import Session
from rftmega.environments.agents.threads import in_thread

WORKER = Path(__file__).with_name("verifiers_worker.py")
STOP_SECONDS = 5.0


class Worker:
    """Worker is a process that runs rollouts of a library, such as verifiers, concurrently; requests
    and replies are lines of JSON on its standard streams.
    """

    def __init__(self, command: Sequence[str], seconds: float, library: str = "verifiers"):
        """Starts the process with `command` and waits until it is ready. `library`: its name, for
        errors.

        Raises InfrastructureFault if the process is not ready within `seconds`. Its error output
        goes to the standard error of this process.
        """
        self._library = library
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]] = {}
        self._ready = threading.Event()
        self.alive = True
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, name=library, daemon=True).start()
        if not self._ready.wait(seconds) or not self.alive:
            self.close()
            raise InfrastructureFault(
                f"the process of {library} did not come up in {seconds:g} s (environment.start_seconds); what it complained of "
                f"is in the log. It was {' '.join(command[:4])} ..."
            )

    async def ask(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Sends a request, a JSON object with these fields, to the process and returns the reply.
        Raises InfrastructureFault if the process ends before it replies.
        """
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        with self._lock:
            self._waiting[number] = loop, future
        try:
            self._write({"id": number, **fields})
            reply: dict[str, Any] = await future
        finally:
            with self._lock:
                self._waiting.pop(number, None)
        return reply

    def close(self) -> None:
        """Terminates the process, and kills it if it does not end within STOP_SECONDS."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _write(self, fields: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            with self._lock:
                self._process.stdin.write(json.dumps(fields) + "\n")
                self._process.stdin.flush()
        except OSError as error:
            raise self._gone() from error
        if not self.alive:
            raise self._gone()

    def _read(self) -> None:
        """Passes each reply of the process to the task that waits for it, until the process ends;
        requests without a reply then fail. Runs in a thread.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            fields = json.loads(line)
            if "ready" in fields:
                self._ready.set()
                continue
            self._settle(fields["id"], fields)
        self.alive = False
        with suppress(subprocess.TimeoutExpired):  # its output ends shortly before the process
            self._process.wait(STOP_SECONDS)
        self._ready.set()
        with self._lock:
            left = list(self._waiting)
        for number in left:
            self._settle(number, None)

    def _settle(self, number: int, fields: dict[str, Any] | None) -> None:
        with self._lock:
            loop, future = self._waiting.get(number, (None, None))
        if loop is None or future is None or loop.is_closed():
            return

        def settle() -> None:
            if future.done():
                return
            if fields is None:
                future.set_exception(self._gone())
            else:
                future.set_result(fields)

        loop.call_soon_threadsafe(settle)

    def _gone(self) -> InfrastructureFault:
        code = self._process.poll()
        return InfrastructureFault(f"the process of {self._library} is gone (exit status {code})")


@implements(Verifiers)
class VerifiersEnvironment:
    """VerifiersEnvironment runs tasks in a process with the verifiers library, whose agents call
    the policy through `Endpoint`.
    """

    def __init__(self, options: Verifiers, tokenizer: Any):
        """Raises ConfigError if the options name no environment, or no Python executable that
        exists.
        """
        if not options.environment or not options.python:
            raise ConfigError(
                "environment: verifiers needs environment.environment, the name of a taskset, and environment.python, the Python "
                "of a virtual environment that has it and requirements/verifiers.txt."
            )
        if not Path(options.python).is_file():
            raise ConfigError(f"environment.python={options.python} is not there.")
        self.options = options
        self.renderer = ConversationRenderer.of(
            tokenizer, options.renderer, tool_parser=options.tool_parser
        )
        self.stop_ids: Sequence[int] = self.renderer.stop_ids
        self.endpoint = Endpoint()
        self._worker: Worker | None = None
        self._starting: asyncio.Lock | None = None

    async def run(self, task: Prompt, model: Model) -> Rollout:
        """Runs a task and returns the rollout. Raises InfrastructureFault if the process or its
        environment fails, and DataError for a prompt without a verifiers task.
        """
        record = json.loads(task.record) if task.record else {}
        if not isinstance(record.get("task"), dict):
            raise DataError(
                f"prompt {task.index} has no column `task`: write data.path with verifiers_worker.py (docs/agents.md)."
            )
        worker = await self._ready()
        session = Session(model, self.renderer)
        key = await self.endpoint.open(session)
        try:
            async with asyncio.timeout(self.options.seconds):
                told = await worker.ask(
                    {
                        "task": record["task"],
                        "base_url": f"{self.endpoint.address}/v1",
                        "api_key": key,
                        "model": MODEL,
                    }
                )
        except TimeoutError as error:
            raise InfrastructureFault(
                f"a rollout of verifiers took over {self.options.seconds:g} s (environment.seconds)"
            ) from error
        finally:
            self.endpoint.shut(key)
        if said := told.get("error"):
            raise InfrastructureFault(f"a rollout of verifiers failed: {said}")
        trajectories = session.trajectories()
        if not trajectories:
            raise InfrastructureFault("a rollout of verifiers asked the model nothing")
        measures = told["metrics"] | {
            "turns": float(session.turns),
            "control_tokens": float(session.control_tokens),
        }
        return Rollout(tuple(trajectories), rewards=told["rewards"], measures=measures)

    async def close(self) -> None:
        """Stops the worker process and the endpoint."""
        if self._worker is not None:
            await in_thread(self._worker.close)
        await self.endpoint.close()

    async def _ready(self) -> Worker:
        """Returns the worker process; starts a new one if none is running."""
        if self._starting is None:
            self._starting = asyncio.Lock()
        async with self._starting:
            if self._worker is None or not self._worker.alive:
                self._worker = await in_thread(Worker, self.command(), self.options.start_seconds)
            return self._worker

    def command(self) -> list[str]:
        """Returns the command that starts the worker process."""
        options = json.dumps(self.options.options)
        return [self.options.python, str(WORKER), "run", self.options.environment, options]
