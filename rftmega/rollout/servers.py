"""Runs vLLM servers in processes of their own on this host: prompts go to them as HTTP, weights
through shared memory.
"""

import asyncio
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import httpx
from torch import Tensor

from rftmega import device, weights
from rftmega.config import RolloutConfig
from rftmega.errors import EngineError, EngineFault
from rftmega.interfaces import WeightSync
from rftmega.parallel.orphans import end_with_parent
from rftmega.parallel.process_group import World
from rftmega.rollout import door
from rftmega.rollout.base import Engine, Finished, More, Stop
from rftmega.rollout.request_order import Waiting, ordered
from rftmega.rollout.vllm_models import model_arguments
from rftmega.shards import Shard
from rftmega.types import Completion, Prompt

RANKS_OWN = {  # what tells a process that it is a rank of the trainer
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "VLLM_ENABLE_V1_MULTIPROCESSING",
}
EXPECT = "init_weight_transfer_engine"
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
LOOK_SECONDS = 0.2  # between two looks whether what has arrived, and was scored since, is enough


class Server:
    """One `vllm serve`, on loopback. It ends with the process that started it."""

    def __init__(self, arguments: Sequence[str], environment: dict[str, str], log: Path):
        """Returns at once; `wait` for it.

        The `environment` has the key that it asks everybody for.
        """
        self._headers = door.headers(environment[door.KEY])
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
                    f"{self.address}/health", timeout=5, headers=self._headers, trust_env=False
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
                headers=self._headers,
                trust_env=False,
            )
        except httpx.TransportError as error:
            raise self._fault(f"does not answer ({error!r})") from error
        if response.is_error:
            raise EngineError(
                f"The vLLM server at {self.address} failed in {path}: {response.text[:500]}. {self._last_words()}"
            )

    async def answer(
        self, client: httpx.AsyncClient, prompt: Prompt, sampling: dict[str, Any], seconds: float
    ) -> dict[str, Any]:
        """Returns one choice, as the server gives it.

        Raises EngineFault where it breaks off, fails or needs over `seconds`.
        """
        body = {"token_ids": list(prompt.token_ids), "sampling_params": sampling}
        try:
            async with asyncio.timeout(seconds):
                response = await client.post(
                    f"{self.address}/inference/v1/generate", json=body, headers=self._headers
                )
        except TimeoutError as error:
            raise self._fault(
                f"gave no answer in {seconds:g} s (rollout.deadline_seconds)"
            ) from error
        except httpx.TransportError as error:
            raise self._fault(f"broke off ({error!r})") from error
        if response.is_server_error:
            raise self._fault(f"failed while generating: {response.text[:500]}")
        if response.is_error:
            raise EngineError(
                f"The vLLM server at {self.address} refused a prompt: {response.text[:500]}"
            )
        choice: dict[str, Any] = response.json()["choices"][0]
        return choice

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

    def _fault(self, what: str) -> EngineFault:
        return EngineFault(f"The vLLM server at {self.address} {what}. {self._last_words()}")

    def _last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"The end of {self.log}:\n" + "\n".join(lines[-5:])


class ServerEngine(Engine):
    """All servers of the run.

    The first process has started them and speaks to them; the others only know the version.
    """

    def __init__(
        self,
        folder: str | Path,
        config: RolloutConfig,
        world: World,
        *,
        dtype: str,
        stop_ids: Sequence[int],
        logs: str | Path,
    ):
        """Starts with random weights; the first push brings the real ones."""
        super().__init__()
        self.stop_ids, self.config = list(stop_ids), config
        self._begun = False  # a push that has not ended
        self._names: dict[str, Any] = {}  # of the tensors that a push brings, as servers are told
        # servers that broke down in a generation, and were not started again yet
        self._failed: set[int] = set()
        self.servers: list[Server] = []
        if not world.is_main:
            return
        on_cuda = device.current().type == "cuda"
        arguments = {
            "model": str(folder),
            "load-format": "dummy",
            "dtype": dtype
            if dtype != "auto"
            else str(device.current().train_dtype).removeprefix("torch."),
            "tensor-parallel-size": config.tensor,
            "max-model-len": config.max_row_tokens,
            "max-num-seqs": config.max_batch,
            "logprobs-mode": "processed_logprobs",
            "weight-transfer-config": json.dumps({"backend": "shared_memory"}),
        }
        flags = [
            "--skip-tokenizer-init",
            "--enable-scale-out",
            "--disable-uvicorn-access-log",
            "--disable-fastapi-docs",
        ]
        flags.append(f"--middleware={door.Door.__module__}.{door.Door.__name__}")
        if on_cuda:
            arguments["gpu-memory-utilization"] = config.memory_fraction
        else:
            arguments["kv-cache-memory-bytes"] = int(config.cpu_cache_gib * 2**30)
            flags.append("--enforce-eager")
        for name, value in model_arguments(folder, on_cuda=on_cuda).items():
            arguments[name.replace("_", "-")] = json.dumps(value)
        self._arguments = [*flags, *(f"--{name}={value}" for name, value in arguments.items())]
        environment = {name: value for name, value in os.environ.items() if name not in RANKS_OWN}
        environment |= {
            "VLLM_SERVER_DEV_MODE": "1",
            "HF_HUB_OFFLINE": "1",
            "TORCHDYNAMO_DISABLE": "0" if on_cuda else "1",
        }
        environment[door.KEY] = secrets.token_urlsafe(32)
        self._environments = [
            environment | _devices(world, config, number) for number in range(config.servers)
        ]
        self._logs = Path(logs)
        self.servers = [self._started(number) for number in range(config.servers)]
        try:
            for server in self.servers:
                server.wait()
        except BaseException:
            self.close()
            raise

    def weight_sync(self, shards: Sequence[Shard], *, bucket_bytes: int) -> WeightSync:
        return weights.SharedWeights(shards, self, bucket_bytes=bucket_bytes)

    def _started(self, number: int) -> Server:
        return Server(
            self._arguments, self._environments[number], self._logs / f"server-{number}.log"
        )

    def restart(self) -> None:
        """Ends the servers that failed or have died, and starts others in their places; all wait
        for a push.

        Raises EngineFault where one does not come up: it did before, so that it is nobody's
        mistake.
        """
        self.invalidate()
        self._failed |= {number for number, server in enumerate(self.servers) if not server.alive}
        for number in self._failed:
            self.servers[number].close()
            self.servers[number] = self._started(number)
        try:
            for number in self._failed:
                self.servers[number].wait()
                self.servers[number].post(EXPECT, self._names)
        except EngineError as error:
            raise EngineFault(str(error)) from error
        self._failed.clear()

    def expect(self, names: Sequence[str]) -> None:
        """Tells the servers which tensors a push brings."""
        self._names = {"init_info": {"names": list(names)}}
        self._all(EXPECT, self._names)

    def begin(self) -> None:
        """Begins a push: nothing is generated until it was whole.

        Servers that have died since are started again.
        """
        self.restart()
        self._all("pause")
        # and broke off; only those workers that failed have ended it, and the others can't begin
        # another
        if self._begun:
            for server in self.servers:
                with suppress(EngineError):
                    server.post("finish_weight_update")
        self._begun = True
        self._all("start_weight_update")

    def take(self, bucket: dict[str, Any]) -> None:
        """Returns when all servers have read the bucket."""
        self._all("update_weights", {"update_info": bucket})

    def finish(self, version: int) -> None:
        """Ends a push whose buckets were all taken: from now on the servers answer, under
        `version`.
        """
        self._all("finish_weight_update", {"weight_version": str(version)})
        self._begun = False
        self._all("resume")

    def _all(self, path: str, body: dict[str, Any] | None = None) -> None:
        """Asks those that have not failed; who fails now is noted."""

        def post(number: int) -> None:
            try:
                self.servers[number].post(path, body)
            except EngineFault:
                self._failed.add(number)
                raise

        with ThreadPoolExecutor(max(1, len(self.servers))) as pool:
            list(
                pool.map(
                    post,
                    [number for number in range(len(self.servers)) if number not in self._failed],
                )
            )

    def _generate(
        self,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        temperature: float,
        finished: Finished,
        stop: Stop,
        more: More,
    ) -> list[Completion | None]:
        if not self.servers:
            return []
        return asyncio.run(self._ask(prompts, seeds, temperature, finished, stop))

    async def _ask(
        self,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        temperature: float,
        finished: Finished,
        stop: Stop,
    ) -> list[Completion | None]:
        """Servers begin with requests of about the same length in all, siblings together, and take
        more when they have room (`order.ordered`); one that runs dry takes what another has not
        begun. One that fails is asked nothing more, while the others give their answers.
        """
        if self._failed:  # in a generation that had enough answers all the same
            raise EngineFault(f"The servers {sorted(self._failed)} broke down before.")
        waiting = Waiting(
            ordered(
                prompts, self.lengths.expected(prompts), len(self.servers), self.config.max_batch
            )
        )
        faults: dict[int, EngineFault] = {}
        found: list[Completion | None] = [None] * len(prompts)
        limits = httpx.Limits(max_connections=None)
        timeout = httpx.Timeout(None, connect=30.0)
        # no proxy has the key
        async with httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False) as client:

            async def one(number: int, place: int) -> None:
                sampling = self._sampling(seeds[place], temperature)
                try:
                    choice = await self.servers[number].answer(
                        client, prompts[place], sampling, self.config.deadline_seconds
                    )
                except EngineFault as fault:
                    faults.setdefault(number, fault)
                    return
                found[place] = completion = self._completion(choice)
                finished([place], [completion])

            running: dict[asyncio.Task[None], int] = {}  # the server of each
            stopped = False
            try:
                while not stopped:
                    busy = Counter(running.values())
                    room = {
                        number: self.config.max_batch - busy[number]
                        for number in range(len(self.servers))
                    }
                    for number, place in waiting.taken(
                        {number: free for number, free in room.items() if number not in faults}
                    ):
                        # a deadline is no time in which one waits
                        running[asyncio.create_task(one(number, place))] = number
                    if not running:
                        break
                    done, _ = await asyncio.wait(
                        running, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED
                    )
                    for task in done:
                        del running[task]
                        task.result()
                    stopped = stop()
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
        self._failed |= faults.keys()
        if faults and not stopped:
            raise next(iter(faults.values()))
        # a closed connection cancels its request some time; the engine must have none before it is
        # pushed to
        if running:
            self._all("abort_requests", {})
        return found

    def _sampling(self, seed: int, temperature: float) -> dict[str, Any]:
        return {
            "temperature": temperature,
            "seed": seed,
            "max_tokens": self.config.max_response_tokens,
            "logprobs": 0,
            "stop_token_ids": self.stop_ids,
            "ignore_eos": True,
            "detokenize": False,
        }

    def _completion(self, choice: dict[str, Any]) -> Completion:
        """Raises EngineError for an answer under other weights than the last push's."""
        assert self.version is not None
        versions = {part["version"] for part in choice["weight_versions"]}
        if versions != {str(self.version)}:
            raise EngineError(
                f"A server answered under weights {sorted(versions)}; the last push was {self.version}."
            )
        ids = tuple(choice["token_ids"])
        logprobs = tuple(content["logprob"] for content in choice["logprobs"]["content"])
        assert choice["finish_reason"] in ("stop", "length"), choice["finish_reason"]
        assert len(ids) == len(logprobs)
        return Completion(ids, logprobs, choice["finish_reason"], self.version)

    def close(self) -> None:
        for server in self.servers:
            server.close()

    def _load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        raise EngineError(
            "A server takes no tensors from this process; weights reach it through weights.SharedWeights."
        )

    def _sleep(self) -> None:
        """Servers have their devices to themselves."""

    def _wake(self, parts: Sequence[str]) -> None: ...


def _devices(world: World, config: RolloutConfig, number: int) -> dict[str, str]:
    """Assigns devices: behind the trainer's, each server has its own; on a CPU they share the cores
    with everybody.
    """
    if device.current().type == "cpu":
        return {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind"
            if config.tensor == 1
            else "|".join(_cores(config.tensor))
        }
    first = world.local_size + number * config.tensor
    places = range(first, first + config.tensor)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else None  # the trainer counts within these
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(names[place] if names else str(place) for place in places)
    }


def _cores(number: int) -> list[str]:
    cores = sorted(os.sched_getaffinity(0))
    return [str(cores[place % len(cores)]) for place in range(number)]


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
