"""Speculative decoding with real vLLM: completions and log-probs are those without it, in the
trainer's processes and on servers, and have the model's distribution.
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from rftmega.config import ParallelConfig, RolloutConfig
from rftmega.config.options.speculative import DraftModel, LookupDrafts, NoDrafts
from rftmega.core.types import Completion, Prompt, Sampling
from rftmega.rollout.engines.draft_counts import acceptance_metrics
from rftmega.rollout.pool.colocated_weights import ColocatedWeights
from rftmega.run.placement.phases import DevicePhases
from rftmega.weights import EngineWeights
from tests.layouts import build_manager
from tests.ranks import VLLM, run_ranks
from tests.tiny_models import save_tiny, transformers_logits

PRELOADED = VLLM

PROMPTS = [Prompt((5, 9, 100)), Prompt((3,)), Prompt((7, 7, 8, 1, 2)), Prompt((5, 9, 100))]
STOP = 1
SAMPLINGS = [
    Sampling(0.7),
    Sampling(0.7, top_p=0.8),
    Sampling(0.9, top_k=5),
    Sampling(0.0),
    Sampling(0.7),  # again, with its own completions as drafts
]
GREEDY = 3
CONFIG = RolloutConfig(max_prompt_tokens=8, max_response_tokens=24, cpu_cache_gib=0.05, max_batch=8)
LOOKUP = LookupDrafts(draft_tokens=3, least_acceptance=0.2)


def generated(engine: Any) -> tuple[list[list[Completion]], list[list[int]]]:
    """Completions, and counts of drafts, of each sampling."""
    seeds, found, counts = range(len(PROMPTS)), [], []
    for each in SAMPLINGS:
        found.append(engine.generate(PROMPTS, seeds=seeds, sampling=each))
        counts.append(engine.draft_counts())
    return found, counts


def colocated_body(world: Any, folder: Path, config: RolloutConfig) -> Any:
    from rftmega.rollout.engines.vllm import VLLMEngine

    os.environ["LOCAL_WORLD_SIZE"] = str(world.size)
    engine = VLLMEngine(folder, config, world, dtype="float32", stop_ids=[STOP])
    if isinstance(config.speculative, DraftModel):  # a GPU loses all weights when it sleeps
        for parameter in engine._runner.drafter.model.parameters():
            parameter.data.zero_()
    engine.sleep()
    shards = build_manager(folder, ParallelConfig(tensor=world.size)).shards()
    EngineWeights(shards, engine, bucket_bytes=2**20).push(version=0)
    found = generated(engine)
    engine.close()
    return found


def served_body(world: Any, folder: Path, config: RolloutConfig) -> Any:
    from rftmega.rollout.servers.server_engine import ServerEngine

    logs = folder.parent / "logs"
    engine = ServerEngine(folder, config, world, dtype="float32", stop_ids=[STOP], logs=logs)
    shards = build_manager(folder, ParallelConfig(tensor=world.size)).shards()
    phases = DevicePhases({}, engine=engine, offload=False)
    sync = engine.weight_sync(shards, bucket_bytes=2**20)
    weights = ColocatedWeights(sync, phases, engine=engine)
    weights.push(version=0)
    found = generated(engine) if world.is_main else None
    if world.is_main:
        engine.generate(PROMPTS, seeds=[1, 2, 3, 4], sampling=SAMPLINGS[0])
    told = weights.push(version=1)  # each process adds its counts
    drafted = told.get("speculative_drafted_tokens", 0)
    assert (drafted > 0) == (config.speculative.draft_tokens > 0)
    engine.close()
    return found


def assert_same(found: Any, plain: Any) -> None:
    for own, others in zip(found, plain, strict=True):
        for completion, other in zip(own, others, strict=True):
            assert completion.token_ids == other.token_ids
            assert completion.finish_reason == other.finish_reason
            assert completion.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize(
    ("variant", "body", "world"),
    [
        ("qwen2", colocated_body, 1),
        pytest.param("qwen2", colocated_body, 2, marks=pytest.mark.ranks),
        pytest.param("gemma3", colocated_body, 1, marks=pytest.mark.ranks),
        pytest.param("qwen2", served_body, 2, marks=pytest.mark.ranks),
    ],
)
def test_completions_with_drafts_are_those_without(
    variant: str, body: Any, world: int, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path / "model", variant, hidden_size=128)
    config = replace(CONFIG, tensor=world if body is colocated_body else 1)
    plain, none = run_ranks(world, body, folder, config, timeout=300)[0]
    drafting = replace(config, speculative=LOOKUP)
    for each in run_ranks(world, body, folder, drafting, timeout=300):
        if each is None:  # servers answer the first process
            continue
        found, counts = each
        assert_same(found, plain)
        # the last sampling is the first one again
        if any(counts[-1]):  # the first process of an engine counts
            assert acceptance_metrics(counts[-1])["speculative_acceptance"] > 0.8
            assert counts[1][0] > counts[1][3], "no draft was rejected"
    assert not any(map(any, none))


@pytest.mark.parametrize(
    "body", [colocated_body, pytest.param(served_body, marks=pytest.mark.ranks)]
)
def test_drafts_of_a_model_are_verified_in_the_same_way(body: Any, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "qwen2", hidden_size=128)
    other = save_tiny(tmp_path / "draft", "qwen2", hidden_size=128, num_hidden_layers=2)
    plain, _ = run_ranks(1, colocated_body, folder, CONFIG, timeout=300)[0]
    rates = []
    for path in (folder, other):
        drafts = DraftModel(path=str(path), draft_tokens=2)
        config = replace(CONFIG, speculative=drafts)
        found, counts = run_ranks(1, body, folder, config, timeout=300)[0]
        assert_same(found, plain)
        rates.append(acceptance_metrics(counts[GREEDY])["speculative_acceptance"])
    assert rates[0] > 0.9  # of the policy's own weights
    assert rates[1] < 0.5


def drawn_body(world: Any, folder: Path, drafts: Any) -> tuple[Counter[tuple[int, ...]], list[int]]:
    """Counts of the second and third token of 20,000 completions of one prompt."""
    from rftmega.rollout.engines.vllm import VLLMEngine

    os.environ["LOCAL_WORLD_SIZE"] = "1"
    config = replace(CONFIG, speculative=drafts, max_response_tokens=3, max_batch=64)
    engine = VLLMEngine(folder, config, world, dtype="float32", stop_ids=[])
    shards = build_manager(folder, ParallelConfig()).shards()
    EngineWeights(shards, engine, bucket_bytes=2**20).push(version=0)
    number = 20_000
    completions = engine.generate(
        [Prompt((3, 5))] * number, seeds=range(number), sampling=Sampling(1.0)
    )
    counts = engine.draft_counts()
    engine.close()
    return Counter(tuple(each.token_ids[1:]) for each in completions), counts


def pairs_of(folder: Path, vocabulary: int) -> dict[tuple[int, ...], float]:
    """The probability of the second and third token, by transformers, summed over the first."""
    rows = [[3, 5, *pair] for pair in product(range(vocabulary), repeat=2)]
    chances = [row.double().softmax(-1) for row in transformers_logits(folder, rows)]
    found = dict.fromkeys(product(range(vocabulary), repeat=2), 0.0)
    for (*_, first, second), each in zip(rows, chances, strict=True):
        for third in range(vocabulary):
            steps: Sequence[Any] = (each[1, first], each[2, second], each[3, third])
            found[second, third] += prod(float(step) for step in steps)
    return found


def chi_square(counts: Counter[tuple[int, ...]], chances: dict[tuple[int, ...], float]) -> float:
    """The p-value of the counts; bins with less than 5 expected are one."""
    total = sum(counts.values())
    expected, observed = [0.0], [0.0]
    for pair, chance in chances.items():
        if total * chance < 5:
            expected[0] += total * chance
            observed[0] += counts[pair]
        else:
            expected.append(total * chance)
            observed.append(counts[pair])
    both = zip(observed, expected, strict=True)
    statistic = sum((seen - due) ** 2 / due for seen, due in both if due)
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, torch.tensor(statistic / 2).double()).item()


@pytest.mark.parametrize(
    "drafts",
    [replace(LOOKUP, least_acceptance=1e-6), pytest.param(NoDrafts(), marks=pytest.mark.ranks)],
)
def test_20_000_completions_have_the_distribution_of_the_model(drafts: Any, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "qwen2", hidden_size=128, vocab_size=12)
    ((counts, drafted),) = run_ranks(1, drawn_body, folder, drafts, timeout=300)
    chances = pairs_of(folder, 12)
    assert sum(chances.values()) == pytest.approx(1)
    assert chi_square(counts, chances) > 1e-3
    assert chi_square(counts, dict.fromkeys(chances, 1 / 144)) < 1e-12
    if drafted:
        assert sum(drafted[:3]) > 5_000
        assert 0 < sum(drafted[3:]) < sum(drafted[:3])
