"""Starts and stops a vLLM server process on this host."""

import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path

from rftmega.core.errors import EngineError
from rftmega.rollout.servers import server_client
from rftmega.rollout.servers.server_client import ServerClient
from rftmega.rollout.servers.vllm import auth
from rftmega.runtime.parallel.orphans import PARENT

PROGRAM = "vllm.entrypoints.openai.api_server"
LOOPBACK = "127.0.0.1"
STOP_SECONDS = 20.0
MISTAKE = re.compile(
    r"\b(ValidationError|ValueError|NotImplementedError|ImportError|ModuleNotFoundError): |Failed to infer device type"
)
PASSING = re.compile(
    r"Free memory on device|out of memory|Cannot allocate memory|Address already in use",
    re.IGNORECASE,
)


class Server(ServerClient):
    """Server is a `vllm serve` process that this process starts, listening on loopback by default.
    The server ends with the process that started it.
    """

    own = True

    def __init__(
        self,
        arguments: Sequence[str],
        environment: dict[str, str],
        log: Path,
        *,
        host: str = LOOPBACK,
        port: int = 0,
        tls: tuple[str, str] | None = None,
    ):
        """Starts the server process and returns at once; `wait` then waits until it responds.

        `arguments`: command-line arguments of `vllm serve`; `environment`: the server's environment
        variables, with the authentication key; `log`: file for its output. `host`: the address of
        this host on which it listens. `port`: 0 for a free port. `tls`: certificate and key files
        for https.
        """
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            port = probe.getsockname()[1]
        named = f"[{host}]" if ":" in host else host
        super().__init__(
            f"{'https' if tls else 'http'}://{named}:{port}",
            auth.headers(environment[auth.KEY]),
            tls=_believes(tls[0]) if tls else None,
        )
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", PROGRAM, "--host", host, "--port", str(port)]
        if tls:
            command += ["--ssl-certfile", tls[0], "--ssl-keyfile", tls[1]]
        with log.open("a") as file:
            self._begin = file.tell()  # offset in the log
            self._process = subprocess.Popen(
                [*command, *arguments],
                env=environment | {PARENT: str(os.getpid())},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        # In case `close` is not called. Ranks are processes of multiprocessing, which ends them
        # without Python's atexit.
        self._closing = Finalize(self, _end, (self._process,), exitpriority=1)

    def wait(self) -> None:
        """Waits until the server responds. If the server does not start, raises EngineError, with
        the end of its log, for permanent causes (an option, the model), and EngineFault for
        transient causes (killed, too slow, no memory or port).
        """
        begin = time.monotonic()
        while time.monotonic() - begin < server_client.START_SECONDS:
            if self._process.poll() is not None:
                break
            if self.there():
                return
            time.sleep(0.2)
        if self._refuses():
            raise EngineError(
                f"The vLLM server at {self.address} did not come up. {self.log_tail()}"
            )
        raise self.fault("did not come up")

    def close(self) -> None:
        """Ends the server process and its child processes."""
        self._closing()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def _refuses(self) -> bool:
        """Returns whether starting the server again would fail the same way: the exit code is 2,
        which argparse uses for invalid arguments, or the log shows an error in MISTAKE and none in
        PASSING (memory or ports that may become free).
        """
        said = self._said()[self._begin :].decode(errors="replace")
        code = self._process.poll()
        return code == 2 or (code == 1 and bool(MISTAKE.search(said)) and not PASSING.search(said))

    def _said(self) -> bytes:
        """Returns the content of the server's log, or a message if the log can't be read."""
        try:
            return self.log.read_bytes()
        except OSError as error:
            return f"(the log can't be read: {error.strerror or error})".encode()

    def log_tail(self) -> str:
        text = self._said().decode(errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        return f"The end of {self.log}:\n" + "\n".join(lines[-5:])


def _believes(certificate: str) -> ssl.SSLContext:
    """Returns an SSL context that trusts only the certificate in the file `certificate`, for any
    host name and issuer.
    """
    believed = ssl.create_default_context(cafile=certificate)
    believed.check_hostname = False
    believed.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return believed


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends `process`, a server, with all processes of its session, including stopped ones."""
    process.terminate()
    with suppress(ProcessLookupError):
        # after SIGTERM, so that a continued process only ends
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
