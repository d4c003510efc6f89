"""vLLM in the trainer's processes tells which experts each token was sent to."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rftmega.config import RolloutConfig
from rftmega.core.expert_routes import RoutedModel
from rftmega.core.types import Prompt, Sampling
from tests.ranks import VLLM, run_ranks
from tests.tiny_models import save_tiny

PRELOADED = VLLM

LONG = tuple((7 * place) % 120 for place in range(150))  # more than a block of the cache
PROMPTS = [Prompt(LONG), Prompt((3,)), Prompt(LONG), Prompt((*LONG[:140], 9, 9)), Prompt((5, 9))]
FACTORS = (1.0, 1.1)  # of the weights of each push
ROUTED = RoutedModel(layers=(0, 2, 3), experts=4, active=2)


def body(world: Any, folder: Path, engine_size: int) -> Any:
    from rftmega.rollout.engines.vllm import VLLMEngine

    config = RolloutConfig(
        max_prompt_tokens=160,
        max_response_tokens=9,
        cpu_cache_gib=0.05,
        max_batch=2,
        tensor=engine_size,
    )
    engine = VLLMEngine(folder, config, world, dtype="float32", stop_ids=[1], routed=ROUTED)
    cached: list[int] = []
    captured: Any = engine._captured
    if captured is not None:
        real = captured._sort

        def counted(tokens: dict[str, int]) -> None:
            batch = engine._runner.input_batch
            for number, name in enumerate(batch.req_ids):
                start = int(batch.num_computed_tokens_cpu[number])
                if name not in captured._by_request and start:
                    cached.append(start)
            real(tokens)

        captured._sort = counted
    found = []
    try:
        for version, factor in enumerate(FACTORS):
            tensors = {
                name: t * factor for name, t in load_file(folder / "model.safetensors").items()
            }
            engine.load_weights(iter(tensors.items()), version=version)
            if captured is not None:
                assert not len(captured._by_slot), "routes of earlier weights were kept"
            completions = engine.generate(PROMPTS, seeds=range(5), sampling=Sampling(1.0))
            found.append([(list(each.token_ids), each.routes) for each in completions])
    finally:
        engine.close()
    return found, cached


@torch.no_grad()
def of_transformers(
    folder: Path, factor: float, rows: list[list[int]]
) -> list[tuple[Tensor, Tensor]]:
    """Returns for each row the experts that transformers chooses with all weights `factor` times as large,
    [tokens fed, layers, experts a token], and how much more probable each token's last expert is than
    the first that it was not sent to, [tokens fed, layers].
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.mul_(factor)
    told: list[Tensor] = []
    for module in model.modules():
        if type(module).__name__ == "Qwen3MoeTopKRouter":
            module.register_forward_hook(lambda router, given, found: told.append(found[0]))
    result = []
    for row in rows:
        told.clear()
        model(torch.tensor([row[:-1]]))
        probabilities, experts = torch.stack(told, 1).softmax(-1).sort(-1, descending=True)
        lead = probabilities[..., ROUTED.active - 1] - probabilities[..., ROUTED.active]
        result.append((experts[..., : ROUTED.active], lead))
    return result


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.ranks)])
def test_routes_of_every_fed_token_are_those_of_transformers(size: int, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "qwen3-moe")
    for found, cached in run_ranks(size, body, folder, size, timeout=300):
        assert len(cached) >= 2, "nobody found a prompt in the cache"
        for completions, factor in zip(found, FACTORS, strict=True):
            rows = [
                [*prompt.token_ids, *ids]
                for prompt, (ids, _) in zip(PROMPTS, completions, strict=True)
            ]
            wanted = of_transformers(folder, factor, rows)
            for (_, routes), (experts, _) in zip(completions, wanted, strict=True):
                assert torch.equal(routes.long().sort(-1).values, experts.sort(-1).values)
