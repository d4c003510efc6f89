"""Runs vLLM servers in processes of their own on this host: prompts go to them as HTTP, weights and
pictures through shared memory.
"""

import asyncio
import json
import logging
import os
import secrets
from array import array
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from rftmega import device, weights
from rftmega.config import RolloutConfig
from rftmega.errors import EngineError, EngineFault
from rftmega.fleet import door, wire
from rftmega.fleet.partial_completion import NOTHING, PartialCompletion
from rftmega.fleet.server import Server
from rftmega.fleet.server_requests import Line, ServerRequests
from rftmega.interfaces import WeightSync
from rftmega.media.placed import unexpanded
from rftmega.media.processor import PictureProcessor
from rftmega.parallel.process_group import World
from rftmega.requests import Request, Requests
from rftmega.rollout.base import Engine
from rftmega.rollout.pictures import check_expanded, check_samples, placeholders
from rftmega.rollout.shared_media import SharedMedia
from rftmega.rollout.vllm_models import (
    limits_of,
    model_arguments,
    prefill_arguments,
    sees,
    stop_strings,
)
from rftmega.sampling_seeds import continued_seed
from rftmega.shards import Shard
from rftmega.types import Completion, Sampling

log = logging.getLogger(__name__)
RANKS_OWN = {  # what tells a process that it is a rank of the trainer
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "VLLM_ENABLE_V1_MULTIPROCESSING",
}
EXPECT = "init_weight_transfer_engine"
PAUSES = {  # rollout.on_update -> how a server stops for new weights
    "wait": "pause?mode=wait",
    "abort": "pause?mode=abort",
    "recompute": "pause?mode=keep&clear_cache=true",
    "keep": "pause?mode=keep&clear_cache=false",
}


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
        self.row_tokens = config.max_row_tokens
        self._begun = False  # a push that has not ended
        self.newest = -1  # version that a server may answer under
        self._names: dict[str, Any] = {}  # of the tensors that a push brings, as servers are told
        # servers that broke down in a generation, and were not started again yet
        self._failed: set[int] = set()
        self.servers: list[Server] = []
        self._media = SharedMedia()
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
            "--enable-scale-out",
            "--disable-uvicorn-access-log",
            "--disable-fastapi-docs",
            "--disable-log-stats",  # a tenth of what a short answer costs
        ]
        flags.append(f"--middleware={door.Door.__module__}.{door.Door.__name__}")
        if on_cuda:
            arguments["gpu-memory-utilization"] = config.memory_fraction
        else:
            arguments["kv-cache-memory-bytes"] = int(config.cpu_cache_gib * 2**30)
            flags.append("--enforce-eager")
        pictures = sees(folder)
        if pictures:
            arguments["limit-mm-per-prompt"] = json.dumps(limits_of(config))
        elif not config.stop:
            flags.append("--skip-tokenizer-init")  # processors of pictures and stop strings want it
        given = prefill_arguments(config, on_cuda=on_cuda) | model_arguments(
            folder, on_cuda=on_cuda
        )
        for name, value in given.items():
            option = name.replace("_", "-")
            if value is False:
                flags.append(f"--no-{option}")
            else:
                arguments[option] = json.dumps(value)
        self._arguments = [*flags, *(f"--{name}={value}" for name, value in arguments.items())]
        environment = {name: value for name, value in os.environ.items() if name not in RANKS_OWN}
        environment |= {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_MEDIA_CONNECTOR": "rftmega",
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
            if pictures:
                self._check_samples(PictureProcessor(folder))
        except BaseException:
            self.close()
            raise

    def _check_samples(self, processor: PictureProcessor) -> None:
        tokens = placeholders(processor, videos=self.config.max_videos > 0)
        for server in self.servers:
            check_samples(server.samples(tokens), processor)

    def weight_sync(self, shards: Sequence[Shard], *, bucket_bytes: int) -> WeightSync:
        return weights.SharedWeights(shards, self, bucket_bytes=bucket_bytes)

    @property
    def healthy(self) -> list[Server]:
        """Returns the servers that have not failed."""
        pairs = enumerate(self.servers)
        return [server for number, server in pairs if number not in self._failed]

    def note_fault(self, server: Server, fault: EngineFault) -> None:
        """Notes that a server failed: it is asked nothing more, and started again before the next
        push.
        """
        if server in self.servers and (number := self.servers.index(server)) not in self._failed:
            log.warning("server %d is asked nothing more: %s", number, fault)
            self._failed.add(number)

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
        self._all(PAUSES[self.config.on_update])
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
        self.newest = version
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

    def _answer(self, requests: Requests, sampling: Sampling) -> None:
        """Servers begin with requests of about the same length in all, siblings together, and take
        more when they have room (`requests.order.ordered`); one that runs dry takes what another has
        not begun. Further requests of a rollout go to its server. One that fails is asked nothing
        more, while the others give their answers.
        """
        if not self.servers:
            return
        if self._failed:  # in a generation that had enough answers all the same
            raise EngineFault(f"The servers {sorted(self._failed)} broke down before.")
        with asyncio.Runner() as runner:
            running = ServerRequests(self.servers, self.config, runner)
            try:
                stopped = running.hold(requests, partial(self._asked, sampling=sampling))
            finally:
                unfinished = running.close()
        self._failed |= running.faults.keys()
        if running.faults and not stopped:
            raise next(iter(running.faults.values()))
        # a closed connection cancels its request some time; the engine must have none before it is
        # pushed to
        if unfinished:
            self._all("abort_requests", {})

    async def _asked(self, line: Line, request: Request, *, sampling: Sampling) -> Completion:
        completion = await self.part(line, request, sampling)
        if completion.reason == "abort" or completion.versions != {self.version}:
            raise EngineError(
                f"A server answered under weights {sorted(completion.versions)}, {completion.reason}; the last push was "
                f"{self.version}."
            )
        return completion.whole()

    async def part(
        self,
        line: Line,
        request: Request,
        sampling: Sampling,
        before: PartialCompletion = NOTHING,
    ) -> PartialCompletion:
        """Asks a server for what follows `before`, and returns both.

        Raises EngineFault where it fails, EngineError where it can't answer, or answers under weights
        that were never pushed.
        """
        parameters = self._parameters(request, sampling)
        parameters["max_tokens"] -= len(before.token_ids)
        parameters["seed"] = continued_seed(request.seed, len(before.token_ids))
        context = [*request.token_ids, *before.token_ids]
        seconds, oldest = self.config.deadline_seconds, self.newest
        if not request.pictures:
            # what other weights have computed is not for a new request
            salt = str(oldest) if self.config.on_update == "keep" else ""
            answer = await line.server.complete(
                line.connection, context, parameters, seconds, salt=salt
            )
        else:
            # one placeholder a picture, since vLLM's processor expands it
            body: dict[str, Any] = {"sampling_params": parameters}
            body["token_ids"] = unexpanded(context, request.pictures)
            async with self._media.shown(request) as parts:
                body |= {"content_parts": parts, "return_token_ids": True}
                reply = await line.server.answer(line.client, body, seconds)
            check_expanded(request, reply["prompt_token_ids"])
            answer = _read(reply["choices"][0])
        added = PartialCompletion.of(answer)
        if not added.versions <= set(range(oldest, self.newest + 1)):
            raise EngineError(
                f"A server answered under weights {sorted(added.versions)}; the last push was {self.newest}."
            )
        return before.with_more(added)

    def _parameters(self, request: Request, sampling: Sampling) -> dict[str, Any]:
        return {
            **sampling._asdict(),
            "seed": request.seed,
            "max_tokens": request.limit(self.config.max_response_tokens),
            "logprobs": 0,
            "stop_token_ids": self.stop_ids,
            "ignore_eos": True,
            **stop_strings(self.config),
        }

    def close(self) -> None:
        for server in self.servers:
            server.close()
        self._media.close()

    def _load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        raise EngineError(
            "A server takes no tensors from this process; weights reach it through weights.SharedWeights."
        )

    def _sleep(self) -> None:
        """Servers have their devices to themselves."""

    def _wake(self, parts: Sequence[str]) -> None: ...


def _read(choice: dict[str, Any]) -> wire.ServerAnswer:
    """Reads what vLLM's own endpoint answers."""
    spans = [(part["version"], part["start"], part["end"]) for part in choice["weight_versions"]]
    logprobs = [content["logprob"] for content in choice["logprobs"]["content"]]
    ids = wire.integers(choice["token_ids"])
    return wire.ServerAnswer(0, ids, array("f", logprobs).tobytes(), choice["finish_reason"], spans)


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
