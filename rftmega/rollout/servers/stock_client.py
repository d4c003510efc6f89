"""Client of a stock vLLM server, i.e. one that runs without this package."""

from collections.abc import Mapping, Sequence
from typing import Any

from rftmega.rollout.servers.protocol import generated
from rftmega.rollout.servers.server_client import Connections, ServerClient
from rftmega.rollout.servers.vllm import protocol


class StockClient(ServerClient):
    """StockClient is the client of a stock vLLM server that the run did not start itself. The
    server must have the trainer's vLLM version, and loads weights from files.
    """

    def take(self, update_info: dict[str, Any]) -> None:
        """Makes the server reload its weights from `update_info["weights_path"]`, a Hugging Face
        folder.
        """
        loaded = {"weights_path": update_info["weights_path"]}
        self.post("collective_rpc", {"method": "reload_weights", "kwargs": loaded})

    def land(self, version: int) -> None:
        self.post("update_weight_version", {"new_version": self.named(version)})
        self.post("resume")

    def identity(self) -> str:
        return ""  # a restart, or another run, shows in the version of its completions

    def claim(self, name: str) -> None:
        """Does nothing: a stock server can't be leased to one run."""

    def release(self) -> None:
        """Does nothing: a stock server can't be leased to one run."""

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
        asked: dict[str, Any] = {"token_ids": list(token_ids), "sampling_params": dict(sampling)}
        if salt:
            asked["cache_salt"] = salt
        return generated.reply_of(await self.generate(connections, asked, seconds)).reply
