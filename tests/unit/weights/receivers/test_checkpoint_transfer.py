"""What a server's worker hands to its loader, of a server that computes in 8 bits and of others."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rftmega.config import RolloutConfig
from rftmega.core.shards import Box
from rftmega.rollout.servers.server_options import arguments_of
from rftmega.runtime.device import CPU
from rftmega.weights.lazy_tensors import LazyTensor
from rftmega.weights.receivers.checkpoint_transfer import CheckpointTransferEngine
from rftmega.weights.receivers.fp8 import described
from tests.block_scales import quantised
from tests.tiny_models import save_tiny

UP, HEAD = "model.layers.0.mlp.up_proj.weight", "lm_head.weight"


class Worker(CheckpointTransferEngine[Any, Any]):
    def __init__(self, said: dict[str, Any] | None) -> None:
        self.got: dict[str, Tensor] = {}
        self.model: Any = SimpleNamespace(load_weights=self.got.update)
        self.model_config: Any = SimpleNamespace(
            hf_config=SimpleNamespace(quantization_config=said)
        )
        self.expect([UP, HEAD])
        self._missing = {UP, HEAD}

    def init_transfer_engine(self, init_info: Any) -> None: ...

    def receive_weights(self, update_info: Any) -> None: ...

    def shutdown(self) -> None: ...


@pytest.mark.parametrize("lazy", [False, True], ids=["whole tensors", "slices on demand"])
def test_a_worker_of_8_bits_quantises_what_a_push_brings(
    lazy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[CPU] = []
    monkeypatch.setattr(CPU, "prepare_fp8", lambda self: prepared.append(self))
    weight = torch.randn(160, 130)
    asked: list[Box] = []

    def fetch(box: Box, out: Tensor) -> None:
        asked.append(box)
        out.copy_(weight[tuple(slice(*ends) for ends in box)])

    given = weight
    if lazy:
        given = LazyTensor.of((160, 130), torch.float32, fetch, torch.device("cpu"))
    worker = Worker(described([HEAD.removesuffix(".weight")]))
    worker.load([(UP, given), (HEAD, weight)])
    numbers, scales = quantised(weight, (128, 128))
    assert worker.got.keys() == {UP, f"{UP}_scale_inv", HEAD}
    assert torch.equal(worker.got[UP].view(torch.uint8), numbers.view(torch.uint8))
    assert torch.equal(worker.got[f"{UP}_scale_inv"], scales)
    assert worker.got[HEAD] is weight
    assert worker._missing == set()
    assert asked == ([((0, 160), (0, 130))] if lazy else [])
    assert len(prepared) == 1, "its first product would end a process"


def test_another_worker_gets_them_as_they_are() -> None:
    weight = torch.randn(4, 4)
    worker = Worker(None)
    worker.load([(UP, weight)])
    assert worker.got.keys() == {UP} and worker.got[UP] is weight


def test_a_server_is_told_at_its_start(tmp_path: Any) -> None:
    folder = save_tiny(tmp_path, "qwen3")
    for quantization, told in (("fp8", True), ("none", False)):
        config = RolloutConfig(quantization=quantization)  # type: ignore[arg-type]
        given = arguments_of(folder, config, dtype="float32", unquantised=["lm_head"])
        overrides = [each for each in given if each.startswith("--hf-overrides=")]
        assert bool(overrides) == told
        assert not told or '"modules_to_not_convert": ["lm_head"]' in overrides[0]
