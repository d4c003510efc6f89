"""Experts of which vLLM itself tells, which it does on CUDA alone; on a CPU they are captured
(tests/distributed/test_captured_routes.py, tests/e2e/test_router_replay.py).
"""

from pathlib import Path

import pytest

from rftmega.runtime import device
from tests.distributed.test_captured_routes import FACTORS, PROMPTS, body, of_transformers
from tests.e2e.conftest import write_arithmetic
from tests.e2e.test_backends import run_body, steps_of
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.gpu
NEAR = 5e-3  # of a probability: vLLM's kernels of experts multiply float32 as TF32


@pytest.fixture(autouse=True)
def _on_the_device() -> None:
    if device.current().type != "cuda":
        pytest.skip("this process computes on a CPU")


def test_routes_of_every_fed_token_are_those_of_transformers_but_for_near_ties(
    tmp_path: Path,
) -> None:
    folder = save_tiny(tmp_path, "qwen3-moe")
    ((found, _),) = run_ranks(1, body, folder, 1)
    others, all_of_them = [], 0
    for completions, factor in zip(found, FACTORS, strict=True):
        rows = [
            [*prompt.token_ids, *ids] for prompt, (ids, _) in zip(PROMPTS, completions, strict=True)
        ]
        wanted = of_transformers(folder, factor, rows)
        for (_, routes), (experts, lead) in zip(completions, wanted, strict=True):
            same = (routes.long().sort(-1).values == experts.sort(-1).values).all(-1)
            others += lead[~same].tolist()
            all_of_them += same.numel()
    assert max(others, default=0.0) < NEAR
    assert len(others) < 0.02 * all_of_them


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_a_run_replays_the_experts_that_vllm_tells_of(dtype: str, tmp_path: Path) -> None:
    import warm_start

    write_arithmetic(tmp_path)
    encode = warm_start.tokenizer()
    symbols = len(warm_start.SYMBOLS)
    save_tiny(tmp_path / "model", "qwen3-moe", vocab_size=symbols, eos_token_id=encode.eos_token_id)
    given = (
        f"trainer.output={tmp_path / 'out'}",
        f"model.dtype={dtype}",
        "rollout.engine=vllm",
        "rollout.router_replay=engine",
        "algorithm.importance_sampling=token",
        "rollout.memory_fraction=0.1",
    )
    run_ranks(1, run_body, tmp_path / "run.yaml", "megatron", *given)
    steps = steps_of(tmp_path / "out")
    assert len(steps) >= 2
    assert all(line["routes_known"] == 1.0 for line in steps)
    if dtype == "float32":
        assert all(line["logprob_gap_max"] < 0.02 for line in steps)
