"""What is asked of vLLM's servers, and in which order; real ones are in
tests/distributed/test_servers.py.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from rftmega.config import RolloutConfig
from rftmega.config.options.speculative import LookupDrafts
from rftmega.core.errors import EngineError, EngineFault
from rftmega.core.media_positions import PlacedImage
from rftmega.core.types import Sampling
from rftmega.data.media.files import digest_of
from rftmega.data.media.image_processor import ImageProcessor
from rftmega.rollout.engines.plugin import VERIFIER
from rftmega.rollout.requests import Request
from rftmega.rollout.servers import server as server_module
from rftmega.rollout.servers import server_options
from rftmega.rollout.servers.protocol.generated import of_vllm
from rftmega.rollout.servers.protocol.server_replies import answered
from rftmega.rollout.servers.server_client import Connections
from rftmega.rollout.servers.server_engine import ServerEngine
from rftmega.rollout.servers.vllm import auth
from rftmega.runtime.parallel.process_group import World
from tests.server_groups import set_servers
from tests.tiny_vision import save_tiny_vision


class Scripted:
    """A server's weight updates as vLLM's worker keeps them: one at a time, and a failing one ends
    itself alone.
    """

    alive = own = True

    def __init__(self) -> None:
        self.active = False
        self.fails = False
        self.versions: list[str] = []

    def post(self, path: str, body: dict[str, Any] | None = None) -> None:
        if path == "start_weight_update":
            self.expect(not self.active)
            self.active = True
        if path == "update_weights":
            self.expect(self.active)
            if self.fails:
                self.active = False
                raise EngineError("no")
        if path == "finish_weight_update":
            self.expect(self.active)
            self.active = False
            if body:
                self.versions.append(body["weight_version"])

    def expect(self, condition: bool) -> None:
        if not condition:
            raise EngineError("out of order")


def engine_of(*fakes: Scripted) -> ServerEngine:
    elsewhere = World(1, 2, 1, 2, torch.device("cpu"))  # starts none
    engine = ServerEngine(
        "model", RolloutConfig(), elsewhere, dtype="float32", stop_ids=[1], logs="logs"
    )
    set_servers(engine, *fakes)
    return engine


def push(engine: ServerEngine, version: int) -> None:
    engine.begin()
    engine.take({})
    engine.finish(version)


def test_after_one_server_failed_all_of_them_take_the_next_push() -> None:
    first, second = Scripted(), Scripted()
    engine = engine_of(first, second)
    push(engine, 0)
    first.fails = True
    with pytest.raises(EngineError, match="no"):
        push(engine, 1)
    first.fails = False
    push(engine, 2)
    assert first.versions == second.versions == ["0", "2"]


class Adaptable(Scripted):
    """A server that takes adapters beside its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []
        self.taken: list[tuple[int, bytes]] = []

    def post(self, path: str, body: dict[str, Any] | None = None) -> None:
        self.told.append(path.partition("?")[0])
        super().post(path, body)

    def land_adapters(self, version: int, payload: bytes) -> None:
        if self.fails:
            raise EngineError("not as it was sent")
        self.taken.append((version, payload))

    def said(self) -> list[str]:
        told, self.told = self.told, []
        return told


WHOLE = ["pause", "start_weight_update", "update_weights", "finish_weight_update"]


def test_a_frozen_model_goes_to_servers_without_it_and_adapters_to_all() -> None:
    first, second = Adaptable(), Adaptable()
    elsewhere = World(1, 2, 1, 2, torch.device("cpu"))
    engine = ServerEngine(
        "model", RolloutConfig(), elsewhere, dtype="float32", stop_ids=[1], logs="logs",
        adapter_rank=8,
    )  # fmt: skip
    set_servers(engine, first, second)
    for member in engine.server_group.members:
        member.health.came()
    engine.payload = b"0"
    push(engine, 0)
    assert first.said() == second.said() == WHOLE
    engine.payload = b"1"
    assert not engine.lacks_weights()
    engine.begin()
    engine.finish(1)
    assert first.said() == second.said() == ["pause"]
    engine.server_group.members[1].health.came()  # it was started again
    engine.payload = b"2"
    assert engine.lacks_weights()
    push(engine, 2)
    assert first.said() == ["pause"] and second.said() == WHOLE
    assert first.taken == second.taken == [(0, b"0"), (1, b"1"), (2, b"2")]
    assert first.versions == second.versions == [], "it answers before it has the adapters"
    second.fails = True
    engine.begin()
    engine.finish(3)
    assert [str(each.state) for each in engine.server_group.members] == ["healthy", "stale"]
    first.fails = True
    engine.begin()
    with pytest.raises(EngineFault, match="No server has the adapters of push 4"):
        engine.finish(4)


def test_servers_take_the_devices_behind_the_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cuda:
        type = "cuda"

    monkeypatch.setattr(server_options.device, "current", Cuda)
    config = RolloutConfig(tensor=2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert server_options.devices_of(4, config) == {"CUDA_VISIBLE_DEVICES": "4,5"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,GPU-c,GPU-d")
    assert server_options.devices_of(4, config) == {"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-d"}


def test_vllms_own_answer_is_read_with_the_version_of_each_token() -> None:
    choice: dict[str, Any] = {
        "token_ids": [4, 1],
        "finish_reason": "stop",
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]},
        "weight_versions": [{"version": "3", "start": 0, "end": 2}],
    }
    found = answered(of_vllm(choice))
    assert (list(found.logprobs), found.versions) == ([-0.5, -0.25], {3})
    choice["weight_versions"] = [
        {"version": "3", "start": 0, "end": 1},
        {"version": "2", "start": 1, "end": 2},
    ]
    assert answered(of_vllm(choice)).versions == {
        2,
        3,
    }  # see test_fleet_client.py


def ending_server(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> Any:
    """Starts a server whose program is this one."""
    (folder / "ends.py").write_text(program)
    monkeypatch.setattr(server_module, "PROGRAM", "ends")
    environment = {"PYTHONPATH": str(folder), auth.KEY: "key"}
    return server_module.Server(["--no-such-option"], environment, folder / "log")


REFUSED = "import argparse\nargparse.ArgumentParser().parse_args()\n"


def test_a_server_that_does_not_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ending_server(tmp_path, monkeypatch, REFUSED)
    with pytest.raises(EngineError, match="did not come up") as caught:
        server.wait()
    assert f"The end of {tmp_path / 'log'}" in str(caught.value)
    assert "unrecognized arguments" in str(caught.value)
    assert not isinstance(caught.value, EngineFault)
    server.close()
    server.close()  # twice is once


def test_a_server_whose_log_is_gone_fails_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ending_server(tmp_path, monkeypatch, REFUSED)
    (tmp_path / "log").unlink()
    with pytest.raises(EngineError, match="the log can't be read: No such file"):
        server.wait()
    server.close()
    assert isinstance(server.fault("hangs"), EngineFault)


@pytest.mark.parametrize(
    ("said", "code", "passes"),
    [
        (
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
            1,
            False,
        ),
        ("(EngineCore pid=7) ValueError: No available memory for the cache blocks.", 1, False),
        # CUDA's build, no GPU
        (
            "RuntimeError: Failed to infer device type, please set the environment variable",
            1,
            False,
        ),
        (
            "(EngineCore pid=7) ValueError: Free memory on device cuda:0 (1.0/80.0 GiB) on startup is less than desired",
            1,
            True,
        ),
        ("ValueError: on an earlier line\ntorch.OutOfMemoryError: CUDA out of memory.", 1, True),
        ("OSError: [Errno 98] Address already in use", 1, True),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", 1, True),
        ("ValueError: on an earlier line", -9, True),
    ],
)
def test_a_server_that_ends_at_its_start_is_a_fault_where_another_start_may_go_well(
    said: str, code: int, passes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").write_text("ValueError: of the start before\n")
    server = ending_server(
        tmp_path,
        monkeypatch,
        f"import os\nprint({said!r}, flush=True)\nos._exit({code}) if {code} > 0 else os.kill(os.getpid(), {-code})",
    )
    with pytest.raises(EngineError, match="did not come up") as caught:
        server.wait()
    server.close()
    assert isinstance(caught.value, EngineFault) == passes
    assert said.splitlines()[-1] in str(caught.value)


class OtherProcessor(Scripted):
    """A server whose image processor is another."""

    def samples(self, tokens: dict[str, int]) -> dict[str, str]:
        return {kind: f"torch.float32 [40, 1176] {token}" for kind, token in tokens.items()}


def test_a_server_that_makes_other_numbers_of_a_image_is_refused(tmp_path: Path) -> None:
    processor = ImageProcessor(save_tiny_vision(tmp_path, "qwen2_vl"))
    with pytest.raises(EngineError, match="the image processors of the two differ"):
        engine_of()._check_samples(OtherProcessor(), processor)  # type: ignore[arg-type]


class Expanding(Scripted):
    """A server that makes so many tokens of every image."""

    def __init__(self, tokens: int):
        super().__init__()
        self.tokens = tokens
        self.asked: list[dict[str, Any]] = []

    async def generate(self, client: Any, body: dict[str, Any], seconds: float) -> dict[str, Any]:
        self.asked.append(body)
        first, placeholder, *rest = body["token_ids"]
        choice = {
            "token_ids": [4],
            "finish_reason": "length",
            "logprobs": {"content": [{"logprob": -0.5}]},
            "weight_versions": [{"version": "3", "start": 0, "end": 1}],
        }
        expanded = [first, *[placeholder] * self.tokens, *rest]
        return {"prompt_token_ids": expanded, "choices": [choice]}


def test_an_answer_to_a_prompt_that_was_expanded_otherwise_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    Image.new("RGB", (40, 40)).save(path)
    image = PlacedImage(str(path), digest_of(path.read_bytes()), (1, 4, 4), 1, 4)
    request = Request([7, 5, 5, 5, 5, 8], seed=0, images=(image,))

    def asked(server: Expanding) -> list[int]:
        engine = engine_of(server)
        engine.version = engine.newest = 3
        asking = engine._asked(Connections(server, None, None), request, sampling=Sampling(1.0))  # type: ignore[arg-type]
        return list(asyncio.run(asking).token_ids)

    right = Expanding(4)
    assert asked(right) == [4]
    (body,) = right.asked
    assert body["token_ids"] == [7, 5, 8]
    assert [part["uuid"] for part in body["content_parts"]] == [image.digest]
    with pytest.raises(EngineError, match="vLLM made 7 tokens of a prompt with 1 image"):
        asked(Expanding(5))


def test_threads_of_a_server_on_a_cpu_sleep_while_they_wait_unless_they_are_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert server_options.environment_of("key")["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert server_options.environment_of("key")["OMP_WAIT_POLICY"] == "ACTIVE"


def test_a_server_that_decodes_speculatively_verifies_by_sampling() -> None:
    assert VERIFIER not in server_options.environment_of("key")
    found = server_options.environment_of("key", speculates=True)
    # vLLM's other model runner has a verification of its own
    assert (found[VERIFIER], found["VLLM_USE_V2_MODEL_RUNNER"]) == ("1", "0")


class Drafting(Scripted):
    """A server with these counts of drafts; without any, it was started without drafts."""

    address = "http://10.0.0.2:8100"

    def __init__(self, *counts: int):
        super().__init__()
        self.counts = list(counts)

    def draft_counts(self, positions: int) -> list[int]:
        if not self.counts:
            raise EngineFault("400")
        return self.counts


def test_every_process_knows_how_many_tokens_a_draft_has_and_servers_counts_are_added(
    caplog: pytest.LogCaptureFixture,
) -> None:
    elsewhere = World(1, 2, 1, 2, torch.device("cpu"))
    config = RolloutConfig(speculative=LookupDrafts(draft_tokens=2))
    engine = ServerEngine("", config, elsewhere, dtype="float32", stop_ids=[], logs="")
    # all processes add their counts together at each push
    assert (engine.draft_tokens, engine.draft_counts()) == (2, [0, 0, 0, 0])
    set_servers(engine, Drafting(5, 3, 2, 1), Drafting(), Drafting(1, 1, 1, 0))
    assert engine.draft_counts() == engine.draft_counts() == [6, 4, 3, 1]
    assert caplog.text.count("was it started with rollout.speculative?") == 1
