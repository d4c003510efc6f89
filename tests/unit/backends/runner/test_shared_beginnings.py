"""What a runner plans and counts of rows that begin alike."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rftmega.backends.runner.flops import forward_flops
from rftmega.backends.runner.model_runner import ModelRunner, refusal_to_share
from rftmega.config import LoRA, ParallelConfig, RunConfig
from rftmega.core.types import Rows, TokenStats
from rftmega.model_providers.description import describe
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.runtime.device.spans import recorder
from tests.layouts import config_of, rows_of
from tests.tiny_models import save_tiny

PROMPT, SAMPLES = 70, 5


class Runner(ModelRunner):
    """A runner whose packed rows are padded to a multiple of 8."""

    why = ""

    def _slots(self, counts: Sequence[int]) -> int:
        return -(-sum(counts) // 8) * 8

    def why_nothing_shared(self) -> str:
        return self.why


def runner_of(config: RunConfig, ranks: int = 1) -> Runner:
    description = describe(read_hf_config(Path(config.model.path)))
    model: Any = SimpleNamespace(cfg=config, description=description)
    placed: Any = SimpleNamespace(data=ranks, data_rank=0)
    return Runner(model, placed, TokenStats)


def alike(prompt: int) -> Rows:
    """Rows of 20 tokens behind one prompt, and one row of its own."""
    torch.manual_seed(1)
    begin = list(range(prompt))
    rows = [begin + torch.randint(100, (20,)).tolist() for _ in range(SAMPLES)]
    return rows_of([*rows, torch.randint(100, (30,)).tolist()])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_beginning_counts_once_in_every_micro_batch(ranks: int, tmp_path: Path) -> None:
    runner = runner_of(
        config_of(save_tiny(tmp_path, "qwen3"), ParallelConfig(), token_cap=300), ranks
    )
    model = runner.stepped.description
    rows = alike(PROMPT)
    recorder.measuring = True
    recorder.take()
    planned = runner._micro_batches(rows, passes=3, masked=True)
    counted = recorder.take()
    recorder.measuring = False
    tokens = [PROMPT + 19] * SAMPLES + [29]
    assert counted["tokens"] == sum(tokens)
    once = SAMPLES - ranks  # each rank computes it
    assert counted["computed"] == sum(tokens) - once * PROMPT
    whole = forward_flops(model, tokens, predicted=int(rows.mask.sum()))
    saved = once * forward_flops(model, [PROMPT], predicted=0)
    assert counted["flops"] == 3 * (whole - saved)
    assert counted["slots"] % 8 == 0
    assert 0 <= counted["slots"] - counted["computed"] < 8 * 2 * ranks
    if ranks == 1:
        (index,), (sorted_rows,) = planned
        assert sorted_rows is not None
        assert rows.lengths[index][sorted_rows.order].tolist() == (sorted_rows.lengths + 1).tolist()


def test_rows_are_computed_one_by_one_where_nothing_or_little_is_saved(tmp_path: Path) -> None:
    config = config_of(save_tiny(tmp_path, "qwen3"), ParallelConfig(), token_cap=400)
    runner = runner_of(config)
    assert runner._sorted(alike(PROMPT)) is not None
    assert runner._sorted(alike(10)) is None
    refusing = type("Refusing", (Runner,), {"why": "a reason"})
    assert not refusing(runner.stepped, runner.ranks, TokenStats).shares
    config.trainer.share_prefixes = False
    assert not runner_of(config).shares


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda config: setattr(config.rollout, "router_replay", "trainer"), "router_replay"),
        (lambda config: setattr(config.model, "dropout", 0.1), "dropout"),
        (lambda config: setattr(config.model, "lora", LoRA(rank=2, dropout=0.1)), "dropout"),
        (lambda config: setattr(config.model, "lora", LoRA(rank=0, dropout=0.1)), ""),
        (lambda config: None, ""),
    ],
)
def test_what_belongs_to_one_row_is_not_shared(change: Any, why: str) -> None:
    config, here = RunConfig(), torch.device("cpu")
    change(config)
    assert why in refusal_to_share(config, here, torch.float32)
    assert bool(refusal_to_share(config, here, torch.float32)) == bool(why)
    assert refusal_to_share(config, torch.device("cuda"), torch.float32)
    assert bool(refusal_to_share(config, torch.device("cuda"), torch.bfloat16)) == bool(why)
