"""vLLM with an architecture that it builds from the classes of transformers, in the trainer's process."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from rftmega.config import RolloutConfig
from rftmega.core.types import Completion, Prompt, Sampling
from tests.ranks import VLLM, run_ranks

PRELOADED = VLLM
PROMPT = Prompt((5, 9, 100, 7))
VOCABULARY = 131


def save_phi(folder: Path) -> Path:
    """A tiny Phi: its LM head has a bias, and vLLM has no class of its own for it."""
    config = transformers.PhiConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    torch.manual_seed(3)
    transformers.PhiForCausalLM(config).save_pretrained(folder)
    return folder


def body(world: Any, folder: Path, order: int) -> Any:
    from rftmega.rollout.engines.vllm import VLLMEngine

    os.environ["LOCAL_WORLD_SIZE"] = "1"
    trained = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    decoder = type(trained.model)
    before = decoder.__bases__, decoder.__init__, decoder.__call__
    config = RolloutConfig(max_prompt_tokens=8, max_response_tokens=6, cpu_cache_gib=0.05)
    engine = VLLMEngine(folder, config, world, dtype="float32", stop_ids=[1])
    assert (decoder.__bases__, decoder.__init__, decoder.__call__) == before
    AutoModelForCausalLM.from_config(trained.config)  # another one can be built
    engine.trace_load((name, tensor) for name, tensor in tensors_of(trained, order))
    compared = []
    for version in range(2):
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter += torch.randn_like(parameter) * 0.1
        engine.load_weights(tensors_of(trained, order), version=version)
        (completion,) = engine.generate([PROMPT], seeds=[version], sampling=Sampling(1.0))
        compared.append((list(completion.logprobs), log_probs_of(trained, completion)))
    engine.close()
    return compared


def tensors_of(model: Any, order: int) -> list[tuple[str, torch.Tensor]]:
    return list(model.state_dict().items())[::order]


def log_probs_of(model: Any, completion: Completion) -> list[float]:
    ids = [*PROMPT.token_ids, *completion.token_ids]
    with torch.no_grad():
        every = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    first = len(PROMPT.token_ids)
    return [float(every[at - 1, ids[at]]) for at in range(first, len(ids))]


@pytest.mark.ranks
@pytest.mark.parametrize("order", [1, -1], ids=["weight before bias", "bias before weight"])
def test_a_head_bias_is_pushed_and_the_trainers_class_stays_as_it_was(
    order: int, tmp_path: Path
) -> None:
    ((first, second),) = run_ranks(1, body, save_phi(tmp_path / "model"), order)
    assert len(first[0]) > 1
    assert first[0] == pytest.approx(first[1], abs=1e-5)
    assert second[0] == pytest.approx(second[1], abs=1e-5)
