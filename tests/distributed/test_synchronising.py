"""One micro-batch's forward asks the device for nothing: whoever does waits until it has caught up."""

import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from rftmega.algorithms.losses import policy_loss
from rftmega.backends.megatron import forward
from rftmega.backends.runner.model_runner import MicroBatch
from rftmega.config import ParallelConfig
from tests.distributed.test_actor import PROMPTS, ROWS, experience_of_plain
from tests.layouts import build_actor, rows_of
from tests.ranks import TRANSFORMER_ENGINE, run_ranks
from tests.tiny_models import save_tiny

DEVICE = torch.device("cpu", 0)  # the host's tensors are on torch.device("cpu"), which is another
WAITING = {
    "item",
    "tolist",
    "numpy",
    "cpu",
    "nonzero",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
}


class FakeDevice(TorchFunctionMode):
    """What is computed from a tensor of the device is there, too; `asked` says where one is read or
    copied to the host.
    """

    def __init__(self, held: list[Tensor]):
        super().__init__()
        self.held = WeakIdKeyDictionary(dict.fromkeys(held))
        self.asked: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        there = any(x in self.held for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        if there and func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return DEVICE
        wanted = next(
            (x for x in tree_leaves((args[1:], kwargs)) if isinstance(x, torch.device)), None
        )
        back = name == "to" and wanted is not None and wanted != DEVICE
        if there and (name in WAITING or back):
            ours = [
                frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename
            ][-2]
            self.asked.append(f"{ours.filename}:{ours.lineno}: {ours.line}")
        found = func(*args, **kwargs)
        if (there and not back) or wanted == DEVICE:
            if wanted == DEVICE and not there:
                found = found.view_as(found)  # the host keeps its own
            for x in tree_leaves(found):
                if isinstance(x, Tensor):
                    self.held[x] = None
        return found


def forward_body(world: Any, folder: Path, parallel: ParallelConfig) -> tuple[list[str], list[str]]:
    """What of ours asks in a forward that learns and one that scores, and what asks where we ask on
    purpose.
    """
    actor = build_actor(folder, parallel)
    experience = experience_of_plain(actor, rows_of(ROWS, PROMPTS))
    real = forward.pack
    forward.pack = lambda *args, **kwargs: real(*args, **{**kwargs, "where": DEVICE})
    there = [x for chunk in actor.manager.chunks for x in (*chunk.parameters(), *chunk.buffers())]
    on_device = experience.changed(torch.clone)
    on_device.changed(lambda x: there.append(x) or x)
    found = []
    batches = (
        MicroBatch(experience.rows, 0.7, on_device, policy_loss()),
        MicroBatch(rows_of(ROWS), 0.7),
    )
    with actor.topology.active():
        for batch in batches:
            with FakeDevice(there) as device:
                output, finish = actor.runner.forward_step(iter([batch]), actor.manager.model[0])
                finish(output)
            assert output in device.held, "the model is not on the device"
            found += device.asked
        with FakeDevice(there) as device:
            there[0].sum().item()
    return found, device.asked


def test_a_micro_batch_is_computed_without_asking_the_device(tmp_path: Path) -> None:
    """Neither by us nor by Megatron's rotation, which would ask twice for queries and for keys of
    each layer.
    """
    folder = save_tiny(tmp_path, "qwen3")
    for parallel in (ParallelConfig(), ParallelConfig(context=2)):
        for found, planted in run_ranks(parallel.context, forward_body, folder, parallel):
            assert len(planted) == 1 and "there[0].sum().item()" in planted[0], planted
            assert found == []


def test_with_the_fused_rotation_of_transformer_engine_nobody_asks(tmp_path: Path) -> None:
    """Its stub does, which stands for kernels."""
    folder = save_tiny(tmp_path, "qwen3")
    ((found, _),) = run_ranks(
        1, forward_body, folder, ParallelConfig(), preloaded=TRANSFORMER_ENGINE
    )
    assert found
    assert all("/tests/stub_te.py:" in place for place in found), found
