"""vLLM answers with the bias of an output head that FSDP2 has pushed."""

import os
from pathlib import Path
from typing import Any

import torch

from rftmega.algorithms.supervised import cross_entropy_loss
from rftmega.config import ParallelConfig, RolloutConfig
from rftmega.experience import given
from rftmega.types import Prompt, Sampling
from rftmega.weights import EngineWeights
from tests.layouts import build_policy, rows_of
from tests.ranks import run_ranks
from tests.tiny_decoders import save_decoder

PROMPTS = [Prompt((5, 9, 100)), Prompt((3,))]
WIDE = {"hidden_size": 128, "num_key_value_heads": 4}  # head size 32, which vLLM has on a CPU


def agreement_body(world: Any, folder: Path) -> list[tuple[list[float], list[float]]]:
    from rftmega.rollout.vllm import VLLMEngine

    os.environ["LOCAL_WORLD_SIZE"] = str(world.size)
    config = RolloutConfig(
        max_prompt_tokens=32, max_response_tokens=8, cpu_cache_gib=0.05, max_batch=8
    )
    actor = build_policy(folder, ParallelConfig(), backend="fsdp")
    engine = VLLMEngine(folder, config, world, dtype="float32", stop_ids=[2])
    sync = EngineWeights(actor.shards(), engine, bucket_bytes=50_000)
    actor.step(given(rows_of([[1, 2, 3, 4]])), cross_entropy_loss())
    actor.residency.finish()
    sync.push(version=1)
    found = []
    answers = engine.generate(PROMPTS, seeds=[1, 2], sampling=Sampling(1.0))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        row = [*prompt.token_ids, *answer.token_ids]
        own = actor.log_probs(rows_of([row])).logp[0]
        chosen = own[len(prompt.token_ids) - 1 : len(row) - 1]
        found.append((list(answer.logprobs), chosen.tolist()))
    engine.close()
    return found


def test_what_vllm_says_after_a_push_of_a_head_with_a_bias_is_what_fsdp_says(
    tmp_path: Path,
) -> None:
    folder = save_decoder(tmp_path, "phi", **WIDE)
    for said, wanted in run_ranks(1, agreement_body, folder)[0]:
        assert len(said) > 1
        torch.testing.assert_close(torch.tensor(said), torch.tensor(wanted), atol=1e-4, rtol=0)
