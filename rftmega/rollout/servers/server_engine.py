"""Presents vLLM or SGLang servers, on this host or others, as one engine. Requests go over HTTP and
WebSockets, weights through shared memory, a process group or files.
"""

import asyncio
import logging
import secrets
import socket
import ssl
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from rftmega.config import RolloutConfig
from rftmega.config.capabilities import engine_of
from rftmega.core.errors import EngineError, EngineFault
from rftmega.core.expert_routes import RoutedModel
from rftmega.core.interfaces import WeightSync
from rftmega.core.media_positions import unexpanded
from rftmega.core.sampling_seeds import continued_seed
from rftmega.core.shards import AdapterSource, Shard
from rftmega.core.types import Completion, Metrics, Sampling
from rftmega.data.media.image_processor import ImageProcessor
from rftmega.rollout.engines.base import Engine
from rftmega.rollout.engines.image_prompts import check_expanded, check_samples, placeholders
from rftmega.rollout.engines.shared_media import SharedMedia
from rftmega.rollout.engines.vllm_models import sees, stop_strings
from rftmega.rollout.requests import Request, Requests
from rftmega.rollout.requests.partial_completion import NOTHING, PartialCompletion
from rftmega.rollout.servers.protocol import generated, weight_version
from rftmega.rollout.servers.protocol.completion_checks import LARGEST_ID, CompletionLimits
from rftmega.rollout.servers.protocol.server_replies import StaleReply, answered
from rftmega.rollout.servers.server import Server
from rftmega.rollout.servers.server_client import EXPECT, PAUSES, Connections, ServerClient
from rftmega.rollout.servers.server_group import (
    ServerGroup,
    ServerGroupMember,
    each_at_once,
    post_to_each,
)
from rftmega.rollout.servers.server_options import arguments_of, devices_of, environment_of
from rftmega.rollout.servers.server_requests import ServerRequests
from rftmega.rollout.servers.sglang_client import SGLangClient
from rftmega.rollout.servers.stock_client import StockClient
from rftmega.rollout.servers.vllm import auth
from rftmega.runtime.parallel import preemption
from rftmega.runtime.parallel.process_group import World
from rftmega.weights.transports.adapter_message import NONE, POLICY
from rftmega.weights.transports.broadcast_weights import BroadcastWeights
from rftmega.weights.transports.checkpoint_weights import CheckpointWeights
from rftmega.weights.transports.disk_weights import DiskWeights
from rftmega.weights.transports.network_weights import NetworkWeights
from rftmega.weights.transports.remote_weights import RemoteWeights, WaitingEngine
from rftmega.weights.transports.served_adapters import ServedAdapters
from rftmega.weights.transports.shared_weights import SharedWeights

MESSAGE_SECONDS = 120.0  # time limit of one message of a push

log = logging.getLogger(__name__)


class ServerEngine(Engine):
    """ServerEngine is the engine whose completions come from inference servers: it presents all
    servers of the run as one engine.

    Only the first process of the run starts, finds and connects to servers; the other processes
    only know the weight version.
    """

    vocabulary = LARGEST_ID
    run = ""

    def __init__(
        self,
        folder: str | Path,
        config: RolloutConfig,
        world: World,
        *,
        dtype: str,
        stop_ids: Sequence[int],
        logs: str | Path,
        adapter_rank: int = 0,
        routed: RoutedModel | None = None,
        unquantised: Sequence[str] = (),
        vocabulary: int = LARGEST_ID,
        run: str = "",
    ):
        """Starts the servers of this host, or finds remote ones, and waits until they are ready;
        their weights are random until the first push.

        `folder`: Hugging Face folder of the model; `stop_ids`: tokens that end a completion;
        `logs`: folder for the logs of started servers. `adapter_rank`: rank of the LoRA adapter to
        serve; 0: none. `routed`: the MoE model whose expert routes servers return; None: they
        return no routes. `unquantised`: names of modules that keep their precision under
        rollout.quantization. `vocabulary`: number of valid token ids. `run`: id of the run that
        owns servers and pushes; remote servers have one owner at a time.
        """
        super().__init__()
        self.stop_ids, self.config, self.vocabulary = list(stop_ids), config, vocabulary
        self.row_tokens = config.max_row_tokens
        self.draft_tokens = config.speculative.draft_tokens
        self._without_counts: set[str] = set()  # addresses of servers that don't count drafts
        self._begun = False  # whether a push through shared memory has begun without ending
        self.newest = -1  # newest version that a server may generate with
        self._names: dict[str, Any] = {}  # names of the tensors of a push, as sent to servers
        self._media = SharedMedia()
        self.payload = b""  # the adapters of the last push
        self._adapter = POLICY if adapter_rank else NONE
        self._model, self._logs, self._routed, self.run = folder, Path(logs), routed, run
        self.server_group = ServerGroup(self._started)
        if not world.is_main:
            return
        elsewhere = bool(config.addresses or config.server_list)
        self.run = run or (secrets.token_hex(4) if elsewhere else "")
        key = _given_key() if elsewhere else secrets.token_urlsafe(32)
        self._tls = ssl.create_default_context(cafile=config.tls_ca) if config.tls_ca else None
        self._arguments = arguments_of(
            folder,
            config,
            dtype=dtype,
            adapter_rank=adapter_rank,
            unquantised=unquantised,
            stop_ids=stop_ids,
        )
        self._environment = environment_of(key, speculates=self.draft_tokens > 0)
        self._first_device = world.local_size
        self._processor = ImageProcessor(folder) if sees(folder) else None
        self.server_group = ServerGroup(
            self._started,
            own=0 if elsewhere else config.servers,
            client=self._elsewhere if elsewhere else None,
            addresses=config.addresses,
            server_list=config.server_list,
            check=self._check,
            keep=lambda server: server.claim(self._called),
        )
        try:
            self.server_group.wait()
        except BaseException:
            self.close()
            raise

    @property
    def servers(self) -> list[ServerClient]:
        return self.server_group.servers

    @property
    def healthy(self) -> list[ServerClient]:
        """Returns the clients of the servers that get requests: they respond and have the newest
        weights.
        """
        return self.server_group.healthy

    def _elsewhere(self, address: str) -> ServerClient:
        headers = auth.headers(self._environment[auth.KEY], self.run)
        server = self._kind()(address, headers, tls=self._tls)
        server.run = self.run
        return server

    def _kind(self) -> type[ServerClient]:
        """Returns the client class for remote servers that this config selects: SGLang, stock vLLM,
        or vLLM with this package.
        """
        if not engine_of(self.config).started_here:
            return SGLangClient
        return StockClient if self.config.transport == "checkpoint" else ServerClient

    def _started(self, number: int) -> ServerClient:
        # each server has its own devices, after the trainer's
        own = devices_of(self._first_device + number * self.config.tensor, self.config)
        log = self._logs / f"server-{number}.log"
        server = Server(self._arguments, self._environment | own, log)
        server.run = self.run
        return server

    def _check(self, server: ServerClient) -> None:
        """Checks whether a server fits the run, and claims a remote server for it. Raises
        EngineError if the server's version or image preprocessing differs, or another run holds it.
        """
        if not server.own:
            server.refuse_other_version()
        if self._processor is not None:
            self._check_samples(server, self._processor)
        if not server.own:
            server.claim(self._called)

    @property
    def _called(self) -> str:
        """Returns the description of this run (folder and host) that other runs see if they try to
        claim its servers.
        """
        return f"that of {self._logs.parent.absolute()} on {socket.gethostname()}"

    def _check_samples(self, server: ServerClient, processor: ImageProcessor) -> None:
        tokens = placeholders(processor, videos=self.config.max_videos > 0)
        check_samples(server.samples(tokens), processor)

    def weight_sync(
        self, shards: Sequence[Shard], *, bucket_bytes: int
    ) -> RemoteWeights | SharedWeights:
        config = self.config
        if config.transport == "network":
            over_network = BroadcastWeights if engine_of(config).broadcasts else NetworkWeights
            return over_network(
                shards,
                self,
                bucket_bytes=bucket_bytes,
                host=config.listen,
                seconds=MESSAGE_SECONDS,
            )
        folder = config.weights_folder or self._logs.parent / "weights"
        if config.transport == "disk":
            return DiskWeights(shards, self, bucket_bytes=bucket_bytes, folder=folder, run=self.run)
        if config.transport == "checkpoint":
            return CheckpointWeights(
                shards,
                self,
                bucket_bytes=bucket_bytes,
                model=self._model,
                folder=folder,
                run=self.run,
            )
        return SharedWeights(shards, self, bucket_bytes=bucket_bytes)

    def adapter_sync(
        self, frozen: Sequence[Shard], adapters: AdapterSource, *, bucket_bytes: int
    ) -> WeightSync:
        base = self.weight_sync(frozen, bucket_bytes=bucket_bytes)
        return ServedAdapters(base, adapters, self, bucket_bytes=bucket_bytes)

    def _holds(self, member: ServerGroupMember) -> bool:
        """Returns whether the server `member` already has the frozen base model, so that a push
        only needs to send adapters to it.
        """
        return self._adapter != NONE and member.health.landings > 0

    def note_fault(self, server: ServerClient, fault: EngineFault) -> None:
        """Records a failure of `server`: it gets no requests until it passes a probe. If `fault`
        shows that its weights are stale, it also needs a push first.
        """
        self.server_group.note_fault(server, fault)
        if isinstance(fault, StaleReply) and (member := self.server_group.of(server)) is not None:
            member.health.missed()

    def restart(self) -> None:
        """Restarts the servers started by this run that died or hang. The next request then needs a
        push.

        Raises EngineFault if a server does not start: since it started before, the cause may be
        transient.
        """
        self.invalidate()
        errors = self.server_group.renew()
        if self._names:
            for member in self.server_group.reachable:
                if member.health.landings == 0:
                    self._told_names(member.server)
        if errors:
            raise EngineFault(str(errors[0])) from errors[0]

    def _told_names(self, server: ServerClient) -> None:
        try:
            server.post(EXPECT, self._names)
        except EngineError as error:
            raise EngineFault(str(error)) from error

    # a push through shared memory, which all servers take or none

    def expect(self, names: Sequence[str]) -> None:
        """Prepares all servers for pushes through shared memory. `names`: HF names of the tensors
        that every push contains.
        """
        self._names = {"init_info": {"names": list(names)}}
        self._all(EXPECT, self._names)

    def begin(self) -> None:
        """Begins a push through shared memory: pauses generation on all servers until `finish`.

        Servers started by this run that have died are restarted first.
        """
        self.restart()
        self._all(PAUSES[self.config.on_update])
        for member in self.server_group.reachable:
            member.paused = True
        # an earlier push broke off; only its failed workers have ended it, and the others can't
        # begin another
        if self._begun:
            for server in self.servers:
                with suppress(EngineError):
                    server.post("finish_weight_update")
        self._begun = True
        self._lacking("start_weight_update")

    def lacks_weights(self) -> bool:
        return not all(map(self._holds, self.server_group.reachable))

    def take(self, bucket: dict[str, Any]) -> None:
        """Makes the servers read one bucket of weights from shared memory, and waits until they
        have; servers that already hold the frozen base model are left out. `bucket`: the location
        of the tensors.
        """
        self._lacking("update_weights", {"update_info": bucket})

    def finish(self, version: int) -> None:
        """Ends a push through shared memory, after its last bucket: the servers resume generation,
        with weights of version `version`.
        """
        self.newest = version
        if self._adapter != NONE:
            self._lacking("finish_weight_update")
            self._begun = False
            self._adapted(version)
            return
        self._all(
            "finish_weight_update", {"weight_version": weight_version.named(version, self.run)}
        )
        self._begun = False
        self._all("resume")
        for member in self.server_group.reachable:
            member.paused = False
            member.health.landed()

    def _adapted(self, version: int) -> None:
        """Sends the last push's adapters, of version `version`, to all servers. A server that does
        not accept them gets no requests.

        Raises EngineFault if no server accepts the adapters.
        """

        def adapt(member: ServerGroupMember) -> bool:
            try:
                self.land(member.name, version)
            except EngineError as error:
                self.server_group.note_miss(member, error)
                return False
            return True

        if not any(each_at_once(adapt, self.server_group.reachable)):
            raise EngineFault(f"No server has the adapters of push {version}.")

    def _lacking(self, path: str, body: dict[str, Any] | None = None) -> None:
        """Sends a POST request to `path`, with the JSON `body`, to the reachable servers that need
        weights through shared memory: all servers, or with adapters only servers without the base
        model.
        """
        lacking = [each for each in self.server_group.reachable if not self._holds(each)]
        post_to_each(lacking, path, body, self.server_group.note_fault)

    def _all(self, path: str, body: dict[str, Any] | None = None) -> None:
        """Sends a POST request to `path`, with the JSON `body`, to all reachable servers. A failed
        server is recorded and its EngineFault raised.
        """
        post_to_each(self.server_group.reachable, path, body, self.server_group.note_fault)

    # a push that servers take independently

    def waiting(self) -> list[WaitingEngine]:
        """Pauses all servers that can receive a push, as rollout.on_update selects, and returns
        them.

        If all servers are remote and have ended, waits until one is back. Raises EngineFault if
        none can receive the push.
        """
        self.server_group.pushing = True
        errors = self.server_group.renew()
        if not self.server_group.reachable:
            try:
                self.server_group.wait_for_remote_server(preemption.asked)
            except EngineError as error:  # so that the run is started again
                raise EngineFault(str(error)) from error
        found = self._all_stopped(self.server_group.reachable)
        if not found:
            told = f" {errors[0]}" if errors else ""
            raise EngineFault(f"No server of {len(self.servers)} can be given weights.{told}")
        return found

    def late(self) -> list[WaitingEngine]:
        """Pauses the remote servers that lack the last push's weights, for example new ones, and
        returns them, so that the push can be sent to them.
        """
        self.server_group.pushing = True
        return self._all_stopped(self.server_group.late)

    def pushed(self) -> None:
        """Records that a push has ended, successfully or not: servers may join and leave again."""
        self.server_group.pushing = False

    def _all_stopped(self, members: Sequence[ServerGroupMember]) -> list[WaitingEngine]:
        stopped = each_at_once(self._stopped, members)
        return [each for each in stopped if each is not None]

    def _stopped(self, member: ServerGroupMember) -> WaitingEngine | None:
        """Pauses the server `member` for new weights, and returns its description for the push. If
        the server fails, records that it misses the push and returns None.
        """
        try:
            member.server.stop(self.config.on_update)
            member.paused = True
            workers = self.config.tensor if member.server.own else member.server.workers()
        except EngineError as error:
            self.server_group.note_miss(member, error)
            return None
        return WaitingEngine(member.name, workers, member.server.host, self._holds(member))

    def join(self, name: str, init_info: dict[str, Any]) -> None:
        self.server_group.named(name).server.join(init_info)

    def receive(self, name: str, update_info: dict[str, Any]) -> None:
        """Makes the server `name` receive the weights of a push. `update_info`: arguments of the
        transfer, which depend on the transport. Raises EngineError if the transfer fails.
        """
        self.server_group.named(name).server.take(update_info)

    def land(self, name: str, version: int) -> None:
        """Makes the server `name` generate with the transferred weights, of version `version`, and
        with the adapters if there are any.
        """
        member = self.server_group.named(name)
        if self._adapter == NONE:
            member.server.land(version)
        else:
            member.server.land_adapters(version, self.payload)
        member.paused = False
        member.health.landed()

    def miss(self, name: str, error: EngineError) -> None:
        with suppress(EngineFault):  # a server that has left misses nothing
            self.server_group.note_miss(self.server_group.named(name), error)

    def measures(self) -> Metrics:
        """Returns metrics of the servers: how many are in each state, and the number of requests
        and tokens that each has completed.
        """
        return self.server_group.measures()

    def draft_counts(self) -> list[int]:
        found = [0] * (2 * self.draft_tokens)
        for member in self.server_group.reachable:
            try:
                told = member.server.draft_counts(self.draft_tokens)
            except EngineFault as fault:
                self._log_uncounted(member, fault)
                continue
            found = [sum(pair) for pair in zip(found, told, strict=True)]
        return found

    def _log_uncounted(self, member: ServerGroupMember, fault: EngineFault) -> None:
        """Logs, once, that a server has no counts of drafts, as if it was started without
        rollout.speculative.
        """
        if member.server.address not in self._without_counts:
            self._without_counts.add(member.server.address)
            log.warning(
                "server %d tells no counts of drafts; was it started with rollout.speculative? %s",
                member.number,
                fault,
            )

    def _serve(self, requests: Requests, sampling: Sampling) -> None:
        """Distributes requests over the servers: each server starts with requests of about the same
        total expected length, samples of a group together, and gets more when it has room
        (`requests.order.ordered`); an idle server gets requests that another server has not begun.
        Later turns of a rollout go to the same server. A server that fails gets no more requests,
        while the other servers continue.
        """
        if not self.servers:
            return
        servers = self.healthy
        if not servers:  # they broke down in a generation that still had enough completions
            raise EngineFault("No server is left that could answer.")
        with asyncio.Runner() as runner:
            running = ServerRequests(servers, self.config, runner)
            try:
                stopped = running.hold(requests, partial(self._asked, sampling=sampling))
            finally:
                unfinished = running.close()
        for number, fault in running.faults.items():
            self.note_fault(servers[number], fault)
        if running.stranded and not stopped:
            raise next(iter(running.faults.values()))
        # a closed connection cancels its requests only after a while; before a push the server must
        # have none
        if unfinished:
            each_at_once(self._aborted, self.server_group.reachable)

    def _aborted(self, member: ServerGroupMember) -> None:
        """Aborts all requests of the server `member`. Raises EngineFault if the server does not
        respond, and records the failure.
        """
        try:
            member.server.abort_all()
        except EngineFault as fault:
            self.server_group.note_fault(member.server, fault)
            raise

    async def _asked(
        self, connections: Connections, request: Request, *, sampling: Sampling
    ) -> Completion:
        completion = await self.part(connections, request, sampling)
        if completion.reason == "abort" or completion.versions != {self.version}:
            raise StaleReply(
                f"A server answered under weights {sorted(completion.versions)}, {completion.reason}; the last push was "
                f"{self.version}."
            )
        return completion.whole()

    async def part(
        self,
        connections: Connections,
        request: Request,
        sampling: Sampling,
        before: PartialCompletion = NOTHING,
    ) -> PartialCompletion:
        """Requests a completion, or the continuation of its first part `before`, from one server.
        Returns `before` with the new tokens appended. `connections`: the clients of the server.

        Raises EngineFault if the server fails or its reply is invalid, StaleReply if the server
        generated with weights of another push or run, EngineError if it refuses the request.
        """
        parameters = self._parameters(request, sampling)
        begun = len(before.token_ids)
        room = self.row_tokens - len(request.token_ids)
        parameters["max_tokens"] = min(parameters["max_tokens"], room) - begun
        parameters["seed"] = continued_seed(request.seed, begun)
        context = [*request.token_ids, *before.token_ids]
        seconds, oldest = self.config.deadline_seconds, self.newest
        # a new request must not reuse the cache of other weights
        salt = weight_version.named(oldest, self.run) if self.config.on_update == "keep" else ""
        limits = CompletionLimits(
            parameters["max_tokens"],
            self.vocabulary,
            frozenset(self.stop_ids),
            other_stops=bool(self.config.stop),
        )
        read = partial(answered, limits=limits, run=self.run)
        if not request.images:
            reply = await connections.server.ask(
                connections, context, parameters, seconds, salt=salt, adapter=self._adapter
            )
            added = read(reply, self._routed, len(context))
        else:
            # one placeholder per image, which vLLM's processor expands
            body: dict[str, Any] = {"sampling_params": parameters}
            body["token_ids"] = unexpanded(context, request.images)
            async with self._media.shown(request) as parts:
                body |= {"content_parts": parts, "return_token_ids": True}
                full = generated.reply_of(
                    await connections.server.generate(connections, body, seconds)
                )
            check_expanded(request, full.prompt_token_ids or [])
            added = read(full.reply)
        self.server_group.note_completion(connections.server, len(added.token_ids))
        if not added.versions <= set(range(oldest, self.newest + 1)):
            raise StaleReply(
                f"The server at {connections.server.address} answered under weights {sorted(added.versions)}; the last push was "
                f"{self.newest}."
            )
        return before.with_more(added)

    def _parameters(self, request: Request, sampling: Sampling) -> dict[str, Any]:
        return {
            **sampling._asdict(),
            "seed": request.seed,
            "max_tokens": request.limit(self.config.max_response_tokens, self.row_tokens),
            "logprobs": 0,
            "stop_token_ids": self.stop_ids,
            "ignore_eos": True,
            **stop_strings(self.config),
        }

    def close(self) -> None:
        self.server_group.close()
        self._media.close()

    def _load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        raise EngineError(
            "A server takes no tensors from this process; weights reach it through rollout.transport."
        )

    def _sleep(self) -> None:
        """Does nothing: servers have their own devices."""

    def _wake(self, parts: Sequence[str]) -> None: ...


def _given_key() -> str:
    """Returns the authentication key of remote servers from the environment variable
    RFTMEGA_SERVER_KEY.

    Raises EngineError if the key is missing or invalid.
    """
    try:
        return auth.given_key()
    except ValueError as error:
        raise EngineError(
            f"{error} Servers of rollout.addresses and rollout.server_list ask for it."
        ) from error
