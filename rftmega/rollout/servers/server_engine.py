"""ServerEngine presents vLLM servers, on this host or others, as one engine: prompts go to them over
HTTP and WebSockets, weights through shared memory, a process group or files.
"""

import asyncio
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

MESSAGE_SECONDS = 120.0  # that one message of a push may take


class ServerEngine(Engine):
    """ServerEngine is all servers of the run.

    The first process has started or found them and speaks to them; the others only know the version.
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
        """Starts with random weights; the first push brings the real ones. `adapter_rank`: of the
        adapter that servers answer with; 0: they have none. `routed`: whose routes servers tell;
        None: they tell none. `unquantised`: modules that keep their precision under
        rollout.quantization. `vocabulary`: tokens that answers can have. `run`: whose servers and pushes
        they are; servers elsewhere have one owner at a time.
        """
        super().__init__()
        self.stop_ids, self.config, self.vocabulary = list(stop_ids), config, vocabulary
        self.row_tokens = config.max_row_tokens
        self._begun = False  # a push through shared memory that has not ended
        self.newest = -1  # version that a server may answer under
        self._names: dict[str, Any] = {}  # of the tensors that a push brings, as servers are told
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
            folder, config, dtype=dtype, adapter_rank=adapter_rank, unquantised=unquantised
        )
        self._environment = environment_of(key)
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
        """Returns the servers that answer."""
        return self.server_group.healthy

    def _elsewhere(self, address: str) -> ServerClient:
        headers = auth.headers(self._environment[auth.KEY], self.run)
        server = self._kind()(address, headers, tls=self._tls)
        server.run = self.run
        return server

    def _kind(self) -> type[ServerClient]:
        """Returns how servers elsewhere are spoken to."""
        if self.config.engine == "sglang":
            return SGLangClient
        return StockClient if self.config.transport == "checkpoint" else ServerClient

    def _started(self, number: int) -> ServerClient:
        # behind the trainer's devices each server has its own
        own = devices_of(self._first_device + number * self.config.tensor, self.config)
        log = self._logs / f"server-{number}.log"
        server = Server(self._arguments, self._environment | own, log)
        server.run = self.run
        return server

    def _check(self, server: ServerClient) -> None:
        """Raises EngineError for a server that does not fit the run."""
        if not server.own:
            server.refuse_other_version()
        if self._processor is not None:
            self._check_samples(server, self._processor)
        if not server.own:
            server.claim(self._called)

    @property
    def _called(self) -> str:
        """Returns what another run is told of this one."""
        return f"that of {self._logs.parent.absolute()} on {socket.gethostname()}"

    def _check_samples(self, server: ServerClient, processor: ImageProcessor) -> None:
        tokens = placeholders(processor, videos=self.config.max_videos > 0)
        check_samples(server.samples(tokens), processor)

    def weight_sync(
        self, shards: Sequence[Shard], *, bucket_bytes: int
    ) -> RemoteWeights | SharedWeights:
        config = self.config
        if config.transport == "network":
            over_network = BroadcastWeights if config.engine == "sglang" else NetworkWeights
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
        """Returns whether a server has weights that never change."""
        return self._adapter != NONE and member.health.landings > 0

    def note_fault(self, server: ServerClient, fault: EngineFault) -> None:
        """Notes that a server failed: it is asked nothing more, until it answers a probe, or gets
        weights where it has others.
        """
        self.server_group.note_fault(server, fault)
        if isinstance(fault, StaleReply) and (member := self.server_group.of(server)) is not None:
            member.health.missed()

    def restart(self) -> None:
        """Ends the servers that died or hang, and starts others in their places; all wait for a
        push.

        Raises EngineFault where one does not come up: it did before, so that it is nobody's
        mistake.
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

    # a push through shared memory, which all take or none

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
        for member in self.server_group.reachable:
            member.paused = True
        # and broke off; only those workers that failed have ended it, and the others can't begin
        # another
        if self._begun:
            for server in self.servers:
                with suppress(EngineError):
                    server.post("finish_weight_update")
        self._begun = True
        self._lacking("start_weight_update")

    def lacks_weights(self) -> bool:
        return not all(map(self._holds, self.server_group.reachable))

    def take(self, bucket: dict[str, Any]) -> None:
        """Returns when all servers have read the bucket."""
        self._lacking("update_weights", {"update_info": bucket})

    def finish(self, version: int) -> None:
        """Ends a push whose buckets were all taken: from now on the servers answer, under
        `version`.
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
        """Gives all servers the adapters. One that does not take them is asked nothing more.

        Raises EngineFault where none does.
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
        """Asks those that can be reached and have no weights."""
        lacking = [each for each in self.server_group.reachable if not self._holds(each)]
        post_to_each(lacking, path, body, self.server_group.note_fault)

    def _all(self, path: str, body: dict[str, Any] | None = None) -> None:
        """Asks those that can be reached; who fails now is noted."""
        post_to_each(self.server_group.reachable, path, body, self.server_group.note_fault)

    # a push that each server takes for itself

    def waiting(self) -> list[WaitingEngine]:
        """Returns the servers that can take a push; they have stopped for it as rollout.on_update
        says.

        Raises EngineFault where there is none. Waits where all are elsewhere and have ended: their
        owner starts them again.
        """
        self.server_group.pushing = True
        errors = self.server_group.renew()
        if not self.server_group.reachable:
            try:
                self.server_group.wait_for_one_elsewhere(preemption.asked)
            except EngineError as error:  # so that the run is started again
                raise EngineFault(str(error)) from error
        found = self._all_stopped(self.server_group.reachable)
        if not found:
            told = f" {errors[0]}" if errors else ""
            raise EngineFault(f"No server of {len(self.servers)} can be given weights.{told}")
        return found

    def late(self) -> list[WaitingEngine]:
        """Returns the servers elsewhere that came, or came back, since the last push."""
        self.server_group.pushing = True
        return self._all_stopped(self.server_group.late)

    def pushed(self) -> None:
        """Ends a push, whatever came of it: servers come and go again."""
        self.server_group.pushing = False

    def _all_stopped(self, members: Sequence[ServerGroupMember]) -> list[WaitingEngine]:
        stopped = each_at_once(self._stopped, members)
        return [each for each in stopped if each is not None]

    def _stopped(self, member: ServerGroupMember) -> WaitingEngine | None:
        """Has a server stop for new weights. None where it does not."""
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
        """Has a server take a push. Raises EngineError where it does not."""
        self.server_group.named(name).server.take(update_info)

    def land(self, name: str, version: int) -> None:
        """Has a server answer under a push that it took, with the adapters where it has some."""
        member = self.server_group.named(name)
        if self._adapter == NONE:
            member.server.land(version)
        else:
            member.server.land_adapters(version, self.payload)
        member.paused = False
        member.health.landed()

    def miss(self, name: str, error: EngineError) -> None:
        with suppress(EngineFault):  # who has left misses nothing
            self.server_group.note_miss(self.server_group.named(name), error)

    def measures(self) -> Metrics:
        """Returns how the servers are."""
        return self.server_group.measures()

    def _serve(self, requests: Requests, sampling: Sampling) -> None:
        """Servers begin with requests of about the same length in all, siblings together, and take
        more when they have room (`requests.order.ordered`); one that runs dry takes what another has
        not begun. Further requests of a rollout go to its server. One that fails is asked nothing
        more, while the others give their answers.
        """
        if not self.servers:
            return
        servers = self.healthy
        if not servers:  # they broke down in a generation that had enough answers all the same
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
        # a closed connection cancels its request some time; the engine must have none before it is
        # pushed to
        if unfinished:
            each_at_once(self._aborted, self.server_group.reachable)

    def _aborted(self, member: ServerGroupMember) -> None:
        """Has a server break off what it generates. Raises EngineFault where it does not answer."""
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
        """Asks a server for what follows `before`, and returns both.

        Raises EngineFault where it fails or gives what is no answer, StaleReply where it answers under
        weights that are not the run's, EngineError where it can't answer.
        """
        parameters = self._parameters(request, sampling)
        begun = len(before.token_ids)
        room = self.row_tokens - len(request.token_ids)
        parameters["max_tokens"] = min(parameters["max_tokens"], room) - begun
        parameters["seed"] = continued_seed(request.seed, begun)
        context = [*request.token_ids, *before.token_ids]
        seconds, oldest = self.config.deadline_seconds, self.newest
        # what other weights have computed is not for a new request
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
            # one placeholder an image, since vLLM's processor expands it
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
            "max_tokens": request.limit(self.config.max_response_tokens),
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
        """Servers have their devices to themselves."""

    def _wake(self, parts: Sequence[str]) -> None: ...


def _given_key() -> str:
    """Returns the key of servers that run elsewhere.

    Raises EngineError where there is none.
    """
    try:
        return auth.given_key()
    except ValueError as error:
        raise EngineError(
            f"{error} Servers of rollout.addresses and rollout.server_list ask for it."
        ) from error
