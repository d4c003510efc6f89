"""Server runs one vLLM server in a process of its own on this host."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import httpx

from rftmega.errors import EngineError, EngineFault
from rftmega.fleet import door, wire
from rftmega.fleet.connection import CompletionRefused, Disconnected, ServerConnection
from rftmega.parallel.orphans import end_with_parent

PROGRAM = "vllm.entrypoints.openai.api_server"
START_SECONDS = 600.0
STOP_SECONDS = 20.0
CONTROL_SECONDS = 600.0
MISTAKE = re.compile(
    r"\b(ValidationError|ValueError|NotImplementedError|ImportError|ModuleNotFoundError): |Failed to infer device type"
)
PASSING = re.compile(
    r"Free memory on device|out of memory|Cannot allocate memory|Address already in use",
    re.IGNORECASE,
)


class Server:
    """One `vllm serve`, on loopback. It ends with the process that started it."""

    def __init__(self, arguments: Sequence[str], environment: dict[str, str], log: Path):
        """Returns at once; `wait` for it.

        The `environment` has the key that it asks everybody for.
        """
        self.headers = door.headers(environment[door.KEY])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", PROGRAM, "--host", "127.0.0.1", "--port", str(port)]
        with log.open("a") as file:
            self._begin = file.tell()  # in the log
            self._process = subprocess.Popen(
                [*command, *arguments],
                env=environment | {door.PARENT: str(os.getpid())},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
            )
        # Where nobody closes it. Ranks are processes of multiprocessing, which ends them without
        # Python's atexit.
        self._closing = Finalize(self, _end, (self._process,), exitpriority=1)

    def wait(self) -> None:
        """Waits until it answers. Where it does not come up, raises EngineError, with the end of
        its log, for what it refuses (an option, the model), and EngineFault for whatever may be
        otherwise the next time: killed, too slow, no memory or port.
        """
        begin = time.monotonic()
        while time.monotonic() - begin < START_SECONDS:
            if self._process.poll() is not None:
                break
            with suppress(httpx.TransportError):  # nobody listens yet
                if httpx.get(
                    f"{self.address}/health", timeout=5, headers=self.headers, trust_env=False
                ).is_success:
                    return
            time.sleep(0.2)
        if self._refuses():
            raise EngineError(
                f"The vLLM server at {self.address} did not come up. {self._last_words()}"
            )
        raise self._fault("did not come up")

    def post(self, path: str, body: dict[str, Any] | None = None) -> None:
        """Raises EngineError where it answers with an error, EngineFault where it does not answer."""
        try:
            response = httpx.post(
                f"{self.address}/{path}",
                json=body,
                timeout=CONTROL_SECONDS,
                headers=self.headers,
                trust_env=False,
            )
        except httpx.TransportError as error:
            raise self._fault(f"does not answer ({error!r})") from error
        if response.is_error:
            raise EngineError(
                f"The vLLM server at {self.address} failed in {path}: {response.text[:500]}. {self._last_words()}"
            )

    def samples(self, tokens: Mapping[str, int]) -> dict[str, str]:
        """Returns checksums of what the server makes of sample pictures (`pictures.samples_of_vllm`).

        Raises EngineFault where it does not answer.
        """
        try:
            response = httpx.get(
                f"{self.address}{door.SAMPLES}",
                params=dict(tokens),
                timeout=CONTROL_SECONDS,
                headers=self.headers,
                trust_env=False,
            )
        except httpx.TransportError as error:
            raise self._fault(f"does not answer ({error!r})") from error
        if response.is_error:
            raise self._fault(f"failed in {door.SAMPLES}: {response.text[:500]}")
        found: dict[str, str] = response.json()
        return found

    async def answer(
        self, client: httpx.AsyncClient, body: dict[str, Any], seconds: float
    ) -> dict[str, Any]:
        """Returns the reply to a request with one choice, as the server gives it.

        Raises EngineFault where it breaks off, fails or needs over `seconds`.
        """
        try:
            async with asyncio.timeout(seconds):
                response = await client.post(
                    f"{self.address}/inference/v1/generate", json=body, headers=self.headers
                )
        except TimeoutError as error:
            raise self._late(seconds) from error
        except httpx.TransportError as error:
            raise self._fault(f"broke off ({error!r})") from error
        if response.is_server_error:
            raise self._fault(f"failed while generating: {response.text[:500]}")
        if response.is_error:
            raise self._refused(response.text[:500])
        reply: dict[str, Any] = response.json()
        return reply

    async def complete(
        self,
        connection: ServerConnection,
        token_ids: Sequence[int],
        sampling: Mapping[str, Any],
        seconds: float,
        *,
        salt: str = "",
    ) -> wire.ServerAnswer:
        """Returns the completion of these tokens; see ServerConnection.ask.

        Raises EngineFault where it breaks off, fails or needs over `seconds`.
        """
        try:
            async with asyncio.timeout(seconds):
                return await connection.ask(token_ids, sampling, salt=salt)
        except TimeoutError as error:
            raise self._late(seconds) from error
        except Disconnected as error:
            raise self._fault(str(error)) from error
        except CompletionRefused as error:
            raise self._refused(str(error)) from error
        except EngineError as error:
            raise self._fault(f"failed while generating: {error}") from error

    def close(self) -> None:
        """Ends it and whatever it started."""
        self._closing()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def _refuses(self) -> bool:
        """Returns whether it ended as another start would end: 2 is argparse's code, and vLLM's
        checks raise these.
        """
        said = self.log.read_bytes()[self._begin :].decode(errors="replace")
        code = self._process.poll()
        return code == 2 or (code == 1 and bool(MISTAKE.search(said)) and not PASSING.search(said))

    def _late(self, seconds: float) -> EngineFault:
        return self._fault(f"gave no answer in {seconds:g} s (rollout.deadline_seconds)")

    def _refused(self, why: str) -> EngineError:
        return EngineError(f"The vLLM server at {self.address} refused a prompt: {why}")

    def _fault(self, what: str) -> EngineFault:
        return EngineFault(f"The vLLM server at {self.address} {what}. {self._last_words()}")

    def _last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"The end of {self.log}:\n" + "\n".join(lines[-5:])


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends a server's whole session, stopped processes too."""
    process.terminate()
    with suppress(ProcessLookupError):
        # after SIGTERM, so that it does nothing else when it goes on
        os.killpg(process.pid, signal.SIGCONT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError):  # raised once the session is gone
        # killed at once, vLLM's processes would leave shared memory behind
        os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
