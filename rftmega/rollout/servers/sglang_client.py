"""Client of an SGLang server, for the API of SGLang 0.5.23.

The client was tested against a stand-in made from SGLang's request classes, never against SGLang
itself.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rftmega.core.errors import EngineError
from rftmega.rollout.servers.protocol import generated
from rftmega.rollout.servers.protocol.sglang_sampling import filters, sampling_of
from rftmega.rollout.servers.server_client import (
    CONTROL_SECONDS,
    PROBE_SECONDS,
    Connections,
    ServerClient,
)
from rftmega.rollout.servers.vllm import protocol

VERSION = "0.5.23"
INFO = "/server_info"
# rollout.on_update -> pause mode; for "wait", SGLang itself finishes requests before an update
PAUSES = {"abort": "abort", "recompute": "retract", "keep": "in_place"}
log = logging.getLogger(__name__)


class SGLangClient(ServerClient):
    """SGLangClient is the client of an SGLang server that the run did not start itself."""

    kind = "SGLang"
    generates = "generate"
    wordless = ("abort_request",)
    long = (
        *("update_weights_from_disk", "update_weights_from_distributed"),
        *("init_weights_update_group", "begin_weight_update", "end_weight_update"),
        "pause_generation",
    )
    _keeps_cache = False  # across the push that it is paused for
    _group = ""  # that transfers weights
    _begun = False  # whether the update of the next `take` has begun

    def refuse_other_version(self) -> None:
        """Raises EngineError unless the server runs the SGLang version in VERSION; logs a warning
        if its sampling is not deterministic.
        """
        known = self._info()
        theirs = known.get("version")
        if theirs != VERSION:
            raise EngineError(
                f"The server at {self.address} runs SGLang {theirs}; requests are written for {VERSION}. Install that one."
            )
        if not known.get("enable_deterministic_inference"):
            log.warning(
                "The SGLang server at %s draws without the seeds of requests: a run with it can't be repeated. Start it with "
                "--enable-deterministic-inference.",
                self.address,
            )

    def identity(self) -> str:
        return str(self._info().get("startup_time", ""))

    def workers(self) -> int:
        return self._told_of(INFO, "tp_size", int)

    def claim(self, name: str) -> None:
        """Does nothing: an SGLang server can't be leased to one run."""

    def release(self) -> None:
        """Does nothing: an SGLang server can't be leased to one run."""

    def probe(self, *, paused: bool = False) -> None:
        if paused:  # a paused server only serves requests that need no engine
            self.told("/model_info", seconds=PROBE_SECONDS)
            return
        sampling = {"max_new_tokens": 1, "temperature": 0.0}
        body = {"input_ids": [0], "sampling_params": sampling}
        self.post(self.generates, body, PROBE_SECONDS)

    def stop(self, on_update: str) -> None:
        self._keeps_cache = on_update == "keep"
        if on_update in PAUSES:
            self.post("pause_generation", {"mode": PAUSES[on_update]})
        elif self._group:  # the update waits for running requests before anything is sent
            self._begin()

    def join(self, init_info: dict[str, Any]) -> None:
        """Makes the server join a process group in which the trainer broadcasts weights.
        `init_info`: the fields of SGLang's InitWeightsUpdateGroupReqInput.

        Raises EngineError if the server has data-parallel replicas or pipeline stages, to which
        SGLang does not pass the broadcast weights.
        """
        known = self._info()
        if known.get("dp_size", 1) != 1 or known.get("pp_size", 1) != 1:
            raise EngineError(
                f"The SGLang server at {self.address} has dp_size={known.get('dp_size')} and pp_size={known.get('pp_size')}; a "
                "group for weights reaches tensor-parallel processes alone. Set rollout.transport=checkpoint."
            )
        if self._group:
            with suppress(EngineError):  # it is gone after a server restart
                self.post("destroy_weights_update_group", {"group_name": self._group})
        self._group = init_info["group_name"]
        self.post("init_weights_update_group", init_info)

    def take(self, update_info: dict[str, Any]) -> None:
        """Makes the server receive the weights of a push. `update_info`: the `version`, and either
        `weights_path`, a Hugging Face folder, or `messages`, each with the names, dtypes and shapes
        of tensors that are broadcast together.
        """
        last = {
            "weight_version": self.named(update_info["version"]),
            "flush_cache": not self._keeps_cache,
        }
        if "weights_path" in update_info:
            # its default format is that of its start, which has none for random weights
            body = {"model_path": update_info["weights_path"], "load_format": "auto", **last}
            self.post("update_weights_from_disk", body)
            return
        if not self._begun:
            self._begin()
        self._begun = False
        messages = update_info["messages"]
        for number, message in enumerate(messages, start=1):
            end = last if number == len(messages) else {"flush_cache": False}
            body = {**message, "group_name": self._group, **end}
            self.post("update_weights_from_distributed", body)
        self.post("end_weight_update", {})
        self.updating = False

    def _begin(self) -> None:
        """Begins a weight update on the server, after ending an interrupted update."""
        if self.updating:
            with suppress(EngineError):
                self.post("end_weight_update", {})
        self.updating = self._begun = True
        self.post("begin_weight_update", {})

    def land(self, version: int) -> None:
        self.post("continue_generation", {})

    def abort_all(self, seconds: float = CONTROL_SECONDS) -> None:
        self.post("abort_request", {"abort_all": True}, seconds)

    async def ask(
        self,
        connections: Connections,
        token_ids: Sequence[int],
        sampling: Mapping[str, Any],
        seconds: float,
        *,
        salt: str = "",
        adapter: int = 0,
    ) -> protocol.ServerReply:
        assert not adapter, "only servers of this package take adapters"
        body: dict[str, Any] = {
            "input_ids": list(token_ids),
            "sampling_params": sampling_of(sampling),
            "return_logprob": True,
        }
        if filters(sampling):
            body["return_sampling_mask"] = True
        if salt:
            body["cache_salt"] = salt
        return generated.of_sglang(await self.generate(connections, body, seconds))

    def _info(self) -> dict[str, Any]:
        return self.told(INFO)
