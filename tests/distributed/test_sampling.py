"""Engines draw from the distribution that they are asked for, and end at stop strings."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from rftmega.config import ParallelConfig, RolloutConfig
from rftmega.core.types import Completion, Prompt, Sampling
from rftmega.rollout.engines.transformers import TransformersEngine
from rftmega.weights import EngineWeights
from tests.layouts import build_manager
from tests.ranks import VLLM, run_ranks
from tests.tiny_models import save_tiny, transformers_logits

PRELOADED = VLLM

PROMPTS = [Prompt((5, 9, 100)), Prompt((3,)), Prompt((7, 7, 8, 1, 2))]
SEEDS = range(3)
LONGEST = 24
STOP = 1  # the end of text
LETTERS = "abcdefghijkl"
STRINGS = ["ba", "cbd", "dea", "fgh", "hi"]  # within a token of two letters, or over two or three
TRUNCATED = [
    Sampling(0.8),
    Sampling(0.8, top_p=0.6),
    Sampling(0.8, top_k=3),
    Sampling(0.8, min_p=0.3),
    Sampling(0.8, top_p=0.7, top_k=9, min_p=0.05),
]


def save_model(folder: Path) -> Path:
    """Saves a tiny model whose tokens are two letters each."""
    folder = save_tiny(folder, "qwen2", hidden_size=128)
    words = {f"{a}{b}": 12 * i + j for i, a in enumerate(LETTERS) for j, b in enumerate(LETTERS)}
    letters = Tokenizer(WordLevel(words, unk_token="aa"))
    letters.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(folder)
    return folder


def text_of(ids: Sequence[int]) -> str:
    return "".join(LETTERS[i // 12] + LETTERS[i % 12] for i in ids)


def cut(ids: Sequence[int]) -> list[int]:
    """Returns the answer up to the token that completes the first stop string."""
    for count in range(1, len(ids) + 1):
        if any(string in text_of(ids[:count]) for string in STRINGS):
            return list(ids[:count])
    return list(ids)


def kept(logits: torch.Tensor, sampling: Sampling) -> dict[int, float]:
    """Returns token -> log-probability, token by token in float64 (see `types.Sampling`)."""
    chances = (logits.double() / sampling.temperature).softmax(-1).tolist()
    left = {i: p for i, p in enumerate(chances) if p >= sampling.min_p * max(chances)}
    likeliest = sorted(left, key=lambda i: -left[i])[: sampling.top_k or None]
    whole = sum(left[i] for i in likeliest)
    chosen: list[int] = []
    for token in likeliest:
        if sum(left[i] for i in chosen) / whole < sampling.top_p:
            chosen.append(token)
    total = torch.tensor(sum(left[i] for i in chosen)).log().item()
    return {i: torch.tensor(left[i]).log().item() - total for i in chosen}


CONFIG = RolloutConfig(
    max_prompt_tokens=8,
    max_response_tokens=LONGEST,
    cpu_cache_gib=0.05,
    max_batch=8,
    stop=STRINGS,
)
Completions = list[Completion]


def asked(engine: Any) -> list[Completions]:
    return [engine.generate(PROMPTS, seeds=SEEDS, sampling=each) for each in TRUNCATED]


def with_and_without(engine: Any) -> tuple[list[Completions], list[Completions]]:
    """Returns answers without stop strings, and with those that `engine` was built for."""
    stopped = asked(engine)
    engine.config, engine.stop = replace(engine.config, stop=[]), []
    return asked(engine), stopped


def vllm_body(world: Any, folder: Path) -> tuple[list[Completions], list[Completions]]:
    from rftmega.rollout.engines.vllm import VLLMEngine

    os.environ["LOCAL_WORLD_SIZE"] = "1"
    engine = VLLMEngine(folder, CONFIG, world, dtype="float32", stop_ids=[STOP])
    shards = build_manager(folder, ParallelConfig()).shards()
    EngineWeights(shards, engine, bucket_bytes=2**20).push(version=0)
    found = with_and_without(engine)
    engine.close()
    return found


def servers_body(world: Any, folder: Path) -> tuple[list[Completions], list[Completions]]:
    from rftmega.rollout.servers.server_engine import ServerEngine

    logs = folder.parent / "logs"
    engine = ServerEngine(folder, CONFIG, world, dtype="float32", stop_ids=[STOP], logs=logs)
    shards = build_manager(folder, ParallelConfig()).shards()
    engine.weight_sync(shards, bucket_bytes=2**20).push(version=0)
    found = with_and_without(engine)
    engine.close()
    return found


def transformers_body(world: Any, folder: Path) -> tuple[list[Completions], list[Completions]]:
    engine: Any = TransformersEngine(folder, CONFIG, stop_ids=[STOP], where=world.device)
    engine.load_weights(load_file(folder / "model.safetensors").items(), version=0)
    engine.config = CONFIG
    return with_and_without(engine)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(transformers_body, marks=pytest.mark.ranks),
        vllm_body,
        pytest.param(servers_body, marks=pytest.mark.ranks),
    ],
)
def test_tokens_are_drawn_from_the_asked_distribution_and_answers_end_at_stop_strings(
    body: Any, tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "model")
    ((plain, stopped),) = run_ranks(1, body, folder, timeout=300)
    for sampling, completions in zip(TRUNCATED, plain, strict=True):
        for prompt, completion in zip(PROMPTS, completions, strict=True):
            row = [*prompt.token_ids, *completion.token_ids]
            logits = transformers_logits(folder, [row])[0][len(prompt.token_ids) - 1 : -1]
            for place, (token, logp) in enumerate(
                zip(completion.token_ids, completion.logprobs, strict=True)
            ):
                assert logp == pytest.approx(kept(logits[place], sampling)[token], abs=2e-5)
    ends = 0
    for one, other in zip(sum(plain, []), sum(stopped, []), strict=True):
        assert list(other.token_ids) == cut(one.token_ids)
        assert list(other.logprobs) == list(one.logprobs)[: len(other.token_ids)]
        ends += other.finish_reason == "stop" and other.token_ids[-1] != STOP
        if len(other.token_ids) < LONGEST:
            assert other.finish_reason == "stop"
    assert ends > 3, "the strings end next to none"
