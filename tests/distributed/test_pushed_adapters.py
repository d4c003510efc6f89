"""Adapters that are pushed as adapters: vLLM says what the trainer says, after every push, and the
frozen model is sent only where an engine lost it.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rftmega.algorithms.supervised import cross_entropy_loss
from rftmega.config import LoRA, OptimizerConfig, ParallelConfig, RolloutConfig
from rftmega.converters.adapters import DOWN
from rftmega.core.errors import EngineError
from rftmega.core.shards import AdapterSource
from rftmega.core.types import Prompt, Sampling
from rftmega.trainer.experience import given
from rftmega.weights import adapter_weights
from tests.layouts import build_policy, rows_of
from tests.plain_adapters import ALL, PREFIX, Pairs, adapted, random_pairs, write_pairs
from tests.ranks import VLLM, run_ranks
from tests.tiny_models import save_tiny

PRELOADED = VLLM

P = ParallelConfig
OF_VOCABULARY = ("embed_tokens", "lm_head")
WITH_VOCABULARY = (*ALL, *OF_VOCABULARY)
# the last fills a block of the prefix cache, which is then found again
LONG = tuple((37 * i) % 129 + 2 for i in range(150))
PROMPTS = [Prompt((5, 9, 100)), Prompt((3,)), Prompt(LONG)]
SAMPLING = Sampling(0.7)
ROWS = [[(37 * i + 11 * b) % 131 for i in range(n)] for b, n in enumerate((30, 17, 26))]
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, epsilon=1e-4)


class Pushing:
    """A policy with adapters, an engine for them, and the push between them."""

    def __init__(
        self,
        world: Any,
        folder: Path,
        adapter: Path,
        parallel: ParallelConfig,
        engine_size: int,
        backend: str = "megatron",
        targets: tuple[str, ...] = (),
        **given: Any,
    ):
        from rftmega.rollout.engines.vllm import VLLMEngine

        os.environ["LOCAL_WORLD_SIZE"] = str(world.size)
        rollout = RolloutConfig(
            tensor=engine_size, max_prompt_tokens=180, max_response_tokens=12, cpu_cache_gib=0.05, max_batch=8
        )  # fmt: skip
        lora = LoRA(rank=8, alpha=16, targets=list(targets), path=str(adapter), push="adapters")
        self.actor: Any = build_policy(
            folder,
            parallel,
            OPTIMIZER,
            temperature=0.7,
            token_cap=512,
            lora=lora,
            backend=backend,
        )
        self.engine = VLLMEngine(
            folder, rollout, world, dtype="float32", stop_ids=[1], adapter_rank=8, **given
        )
        held = self.actor.adapters()
        assert held is not None
        self.weights: Any = self.engine.adapter_sync(
            self.actor.frozen_shards(),
            AdapterSource(held, self.actor.replica_group),
            bucket_bytes=50_000,
        )

    def completions(self) -> tuple[float, list[float]]:
        """The largest difference between engine and trainer, and the engine's log-probs of one token."""
        given = [Prompt(each.token_ids) for each in PROMPTS]
        completions = self.engine.generate(given, seeds=[1, 2, 3], sampling=SAMPLING)
        rows = rows_of(
            [[*p.token_ids, *a.token_ids] for p, a in zip(PROMPTS, completions, strict=True)],
            [len(p.token_ids) for p in PROMPTS],
        )
        said = torch.tensor([x for completion in completions for x in completion.logprobs])
        logp = self.actor.log_probs(rows).logp[rows.mask]
        return float((logp - said).abs().max()), said[:3].tolist()

    def learn(self) -> None:
        self.actor.step(given(rows_of(ROWS)), cross_entropy_loss())
        self.actor.residency.finish()


def pushes_body(world: Any, *wanted: Any) -> Any:
    pushing = Pushing(world, *wanted)
    found, push = [], pushing.weights.base.push
    whole: list[int] = []  # versions with which the model was sent

    def noted(*, version: int) -> Any:
        whole.append(version)
        return push(version=version)

    pushing.weights.base.push = noted
    for version in range(3):
        if version == 2:
            pushing.engine.sleep()  # which drops the model
        metrics = pushing.weights.push(version=version)
        assert pushing.engine.version == version
        found.append((metrics, *pushing.completions()))
        pushing.learn()
    pushing.engine.close()
    return found, whole


@pytest.mark.parametrize(
    ("variant", "processes", "parallel", "engine_size", "backend", "targets"),
    [
        pytest.param("qwen3", 1, P(), 1, "megatron", (), marks=pytest.mark.ranks),
        pytest.param(
            "qwen3", 2, P(tensor=2), 1, "megatron", WITH_VOCABULARY, marks=pytest.mark.ranks
        ),
        pytest.param("qwen2", 2, P(pipeline=2), 2, "megatron", (), marks=pytest.mark.ranks),
        pytest.param("qwen3", 2, P(), 2, "fsdp", (), marks=pytest.mark.ranks),
        pytest.param(
            "llama", 2, P(pipeline=2), 2, "megatron", WITH_VOCABULARY, marks=pytest.mark.ranks
        ),
        pytest.param("phi3", 1, P(), 1, "megatron", OF_VOCABULARY, marks=pytest.mark.ranks),
        pytest.param(
            "phi3", 4, P(tensor=2, pipeline=2), 2, "megatron", (), marks=pytest.mark.ranks
        ),
        pytest.param("llama", 4, P(tensor=2), 1, "megatron", (), marks=pytest.mark.ranks),
        pytest.param("phi3", 4, P(tensor=2), 1, "fsdp", (), marks=pytest.mark.ranks),
        ("qwen3", 1, P(), 1, "fsdp", WITH_VOCABULARY),
    ],
)
def test_vllm_with_the_adapters_of_a_push_says_what_the_trainer_says(
    variant: str,
    processes: int,
    parallel: ParallelConfig,
    engine_size: int,
    backend: str,
    targets: tuple[str, ...],
    tmp_path: Path,
) -> None:
    folder = save_tiny(tmp_path / "model", variant, hidden_size=128)
    all_of_them = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj") if variant == "phi3" else ALL
    pairs = random_pairs(folder, rank=8, targets=targets or all_of_them)
    adapter = write_pairs(tmp_path / "adapter", pairs, alpha=16)
    asked = (folder, adapter, parallel, engine_size, backend, targets)
    results = run_ranks(processes, pushes_body, *asked, timeout=300)
    size = sum(x.nbytes for pair in pairs.values() for x in pair)
    for found, whole in results:
        assert max(gap for _, gap, _ in found) < 1e-5
        assert whole == [0, 2], "the model was sent again, or not after the engine had slept"
        assert [metrics["push_adapter_bytes"] for metrics, _, _ in found] == [size] * 3
        assert found[1][0]["push_bytes"] == size
        first, second = (torch.tensor(said) for _, _, said in found[:2])
        assert (first - second).abs().max() > 1e-3, "the second push changed nothing"


def broken_body(world: Any, *wanted: Any) -> Any:
    pushing = Pushing(world, *wanted)
    engine: Any = pushing.engine
    sum_of, load = adapter_weights.sum_of, engine._load_adapter

    def no_room(*given: Any) -> None:
        raise EngineError("no room")

    if world.rank == 1:
        adapter_weights.sum_of = lambda elements: sum_of(elements) + 1
    with pytest.raises(EngineError, match="different adapters in push 1"):
        pushing.weights.push(version=1)
    adapter_weights.sum_of = sum_of
    with pytest.raises(EngineError, match="no weights"):  # the model is there, the adapters are not
        pushing.completions()
    if world.rank == 1:
        engine._load_adapter = no_room
    with pytest.raises(EngineError, match="no room" if world.rank else "failed on another process"):
        pushing.weights.push(version=2)
    engine._load_adapter = load
    with pytest.raises(EngineError, match="no weights"):
        pushing.completions()
    pushing.weights.push(version=3)
    gap, _ = pushing.completions()
    intact = [each.intact for each in pushing.weights.checksums()]
    pushing.learn()
    changed = {each.name for each in pushing.weights.checksums() if not each.intact}
    engine.close()
    return gap, all(intact), changed


def test_an_engine_without_the_adapters_of_a_push_does_not_answer(tmp_path: Path) -> None:
    """And the checksums of a push tell what the trainer has changed since."""
    folder = save_tiny(tmp_path / "model", "qwen3", hidden_size=128)
    pairs = random_pairs(folder, rank=8)
    adapter = write_pairs(tmp_path / "adapter", pairs, alpha=16)
    for gap, intact, changed in run_ranks(
        2, broken_body, folder, adapter, P(tensor=2), 1, timeout=300
    ):
        assert gap < 1e-5 and intact
        assert changed == {f"{name}.lora_{which}.weight" for name in pairs for which in "AB"}


def unserved_body(world: Any, *wanted: Any) -> str:
    pushing = Pushing(world, *wanted)
    with pytest.raises(EngineError) as caught:
        pushing.weights.push(version=1)
    pushing.engine.close()
    return str(caught.value)


@pytest.mark.ranks
def test_an_engine_without_a_place_beside_the_embedding_takes_no_adapter_on_it(
    tmp_path: Path,
) -> None:
    folder = save_tiny(tmp_path / "model", "qwen2", hidden_size=128)
    targets = ("q_proj", "embed_tokens")
    pairs = random_pairs(folder, rank=8, targets=targets)
    adapter = write_pairs(tmp_path / "adapter", pairs, alpha=16)
    asked = (folder, adapter, P(), 1, "megatron", targets)
    (said,) = run_ranks(1, unserved_body, *asked, timeout=300)
    assert "no adapter on model.embed_tokens of Qwen2ForCausalLM" in said


def transformers_says(folder: Path, pairs: Pairs, row: list[int]) -> list[float]:
    """The log-prob of each token behind the first, of transformers' model with pairs beside it."""
    model = adapted(folder, pairs, alpha=16)
    with torch.no_grad():
        logp = (model(torch.tensor([row])).logits[0, :-1] / SAMPLING.temperature).log_softmax(-1)
    found: list[float] = logp[range(len(row) - 1), row[1:]].tolist()
    return found


def several_body(world: Any, folder: Path, own: Path, other: Path, fewer: Pairs) -> Any:
    evaluated = {"other": str(other), "base": ""}
    pushing = Pushing(world, folder, own, P(), 1, evaluated=evaluated)
    pushing.weights.push(version=0)
    found = {}
    for push in range(2):
        now = pushing.weights._pairs.gathered()
        trained = {
            name.removeprefix(PREFIX).removesuffix(DOWN): (a, now[name.replace("lora_A", "lora_B")])
            for name, a in now.items()
            if name.endswith(DOWN)
        }
        pairs: dict[str, Pairs] = {"": trained, "other": fewer, "base": {}}
        for name in ("", "other", "base", ""):
            pushing.engine.use_adapter(name)
            completions = pushing.engine.generate(PROMPTS, seeds=[1, 2, 3], sampling=SAMPLING)
            found[push, name] = 0.0
            for prompt, completion in zip(PROMPTS, completions, strict=True):
                row = [*prompt.token_ids, *completion.token_ids]
                wanted = transformers_says(folder, pairs[name], row)[len(prompt.token_ids) - 1 :]
                gaps = (torch.tensor(wanted) - torch.tensor(list(completion.logprobs))).abs()
                found[push, name] = max(found[push, name], float(gaps.max()))
        if push == 0:
            pushing.learn()
            pushing.engine.sleep()  # which drops the model, and vLLM all adapters with it
            pushing.weights.push(version=1)
    pushing.engine.close()
    return found


def test_several_adapters_on_one_engine_each_answer_as_transformers_says(tmp_path: Path) -> None:
    """The policy's, a frozen one and the model without any, before and after a push and a sleep."""
    folder = save_tiny(tmp_path / "model", "qwen3", hidden_size=128)
    pairs = random_pairs(folder, rank=8)
    own = write_pairs(tmp_path / "own", pairs, alpha=16)
    # of fewer columns, and stronger
    fewer = random_pairs(folder, rank=4, targets=("q_proj", "down_proj"), spread=0.1)
    other = write_pairs(tmp_path / "other", fewer, alpha=16)
    (found,) = run_ranks(1, several_body, folder, own, other, fewer, timeout=300)
    assert len(found) == 6
    assert max(found.values()) < 1e-5, found
