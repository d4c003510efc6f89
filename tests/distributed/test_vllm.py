"""Real vLLM in the trainer's processes: after a push it says what the trainer says, and what
transformers says.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rftmega.algorithms.losses import policy_loss
from rftmega.config import LoRA, ParallelConfig, RolloutConfig
from rftmega.core.errors import EngineError
from rftmega.core.types import Completion, Experience, Prompt, Sampling
from rftmega.rollout.engines.transformers import TransformersEngine
from rftmega.rollout.pool.colocated_weights import ColocatedWeights
from rftmega.run.placement.colocated import ColocatedPolicy
from rftmega.run.placement.phases import DevicePhases
from rftmega.runtime.parallel.collectives import gather_objects
from rftmega.weights import EngineWeights, Exporter
from tests.block_scales import plain_folder, quantise_folder
from tests.families import save_tiny_of
from tests.layouts import build_actor, build_manager, rows_of
from tests.plain_adapters import ALL, random_pairs, write_pairs
from tests.ranks import VLLM, run_ranks
from tests.rollouts import completion_of, pool_of, response_of
from tests.tiny_models import save_tiny

PRELOADED = VLLM

PROMPTS = [
    Prompt((5, 9, 100)),
    Prompt((3,)),
    Prompt((5, 9, 100, 7, 7, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)),
]
STOP = 1


def broken_off(exporter: Exporter) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in exporter:
        yield name, torch.full_like(tensor, 7.0)
        if name.endswith(("q_proj.weight", "qkv_proj.weight")):
            break
    raise EngineError("half of it")


def interrupt(places: Sequence[int], completions: Sequence[Completion]) -> None:
    raise KeyboardInterrupt


@contextmanager
def broken_once(engine: Any) -> Iterator[None]:
    """Within, every engine that has something to do fails in its first step, whose tokens are lost."""
    real, steps = engine._llm.llm_engine.step, count()

    def step() -> Any:
        found = real()
        if next(steps) == 0:
            raise RuntimeError("the first step")
        return found

    engine._llm.llm_engine.step = step
    yield
    engine._llm.llm_engine.step = real
    assert any(gather_objects(next(steps) > 1)), "it was not broken, or never went on"


def by_loader_itself(weights: ColocatedWeights, engine: Any, version: int) -> list[Completion]:
    """Answers, to the last bit of their log-probs, after a push that vLLM's own loader takes whole."""
    pushed: Any = weights.weights
    recording = pushed.recording
    assert recording.proven
    assert len(recording.parameters) > 8, "next to nothing is copied without the loader"
    pushed.recording = None
    weights.push(version=version)
    pushed.recording = recording
    return engine.generate(PROMPTS, seeds=[1, 2, 3], sampling=Sampling(0.7))  # type: ignore[no-any-return]


def agreement_body(
    world: Any, folder: Path, parallel: ParallelConfig, engine_size: int, lora: LoRA | None = None
) -> Any:
    from rftmega.rollout.engines.vllm import VLLMEngine

    os.environ["LOCAL_WORLD_SIZE"] = str(world.size)
    config = RolloutConfig(
        tensor=engine_size,
        max_prompt_tokens=32,
        max_response_tokens=12,
        cpu_cache_gib=0.05,
        max_batch=8,
    )
    actor = build_actor(folder, parallel, temperature=0.7, token_cap=512, lora=lora)
    engine = VLLMEngine(folder, config, world, dtype="float32", stop_ids=[STOP])
    oracle = TransformersEngine(folder, config, stop_ids=[STOP], where=torch.device("cpu"))
    turns = DevicePhases({"policy": actor.manager.residency}, engine=engine, offload=True)
    weights = ColocatedWeights(
        EngineWeights(actor.manager.shards(), engine, bucket_bytes=50_000), turns
    )
    shared = pool_of(engine, turns, world, weights, processes_per_engine=engine_size, restarts=1)
    policy = ColocatedPolicy(actor, turns)
    exporter = Exporter(actor.manager.shards(), actor.topology.replica_group, bucket_bytes=50_000)
    found = []
    for version in range(2):  # the second time other weights, the same prompts: no stale cache
        # the first layer's queries, and no keys and values
        with pytest.raises(EngineError, match="half"):
            engine.load_weights(broken_off(exporter), version=99)
        weights.push(version=version)
        oracle.load_weights(exporter, version=version)
        # the others are still in the engine then, and must not come back
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, seeds=[1, 2, 3], sampling=Sampling(0.7), finished=interrupt)
        completions = shared.generate(PROMPTS, seeds=[1, 2, 3], sampling=Sampling(0.7))
        assert by_loader_itself(weights, shared, version) == completions, (
            "recorded copies are not the loader's"
        )
        completions = [completion_of(a) for a in completions]
        with broken_once(engine):
            mended = shared.generate(PROMPTS, seeds=[1, 2, 3], sampling=Sampling(0.7))
        again = shared.generate(PROMPTS[::-1], seeds=[3, 2, 1], sampling=Sampling(0.7))[::-1]
        rows = rows_of(
            [[*p.token_ids, *a.token_ids] for p, a in zip(PROMPTS, completions, strict=True)],
            [len(p.token_ids) for p in PROMPTS],
        )
        engine_logp = torch.tensor([x for a in completions for x in a.logprobs])
        greedy = [
            [
                completion_of(a)
                for a in shared.generate(PROMPTS, seeds=[0] * 3, sampling=Sampling(0.0))
            ],
            oracle.generate(PROMPTS, seeds=[0] * 3, sampling=Sampling(0.0)),
        ]
        stats = policy.log_probs(rows)
        found.append({
            "gap": (stats.logp[rows.mask] - engine_logp).abs().max().item(),
            "answers": [tuple(a.token_ids) for a in completions],
            "logp": engine_logp.tolist(),
            "mended": [response_of(a) for a in mended],
            "again": [response_of(a) for a in again],
            "versions": {a.policy_version for a in completions},
            "greedy": [[a.token_ids for a in completions] for completions in greedy],
            "reasons": [(a.finish_reason, len(a.token_ids), a.token_ids[-1]) for a in completions],
        })  # fmt: skip
        plain = Experience(
            rows.tokens,
            rows.prompt_lengths,
            rows.lengths,
            rows.mask,
            stats.logp,
            stats.logp,
            None,
            torch.ones_like(stats.logp),
        )
        policy.step(plain, policy_loss())
    engine.sleep()
    weights.push(version=2)  # wakes what it needs
    told: list[int] = []
    completions = engine.generate(
        PROMPTS,
        seeds=[1, 2, 3],
        sampling=Sampling(0.7),
        finished=lambda places, completions: told.extend(places),
    )
    assert sorted(told) == [0, 1, 2]
    assert {completion.policy_version for completion in completions} == {2}
    dist.barrier()
    engine.close()
    return found


def also(world: int, parallel: ParallelConfig, engine_size: int) -> Any:
    """The other pairs of layouts that benchmarks/push.py measures."""
    return pytest.param("qwen3", world, parallel, engine_size, marks=pytest.mark.ranks)


@pytest.mark.parametrize(
    ("variant", "world", "parallel", "engine_size"),
    [
        also(4, ParallelConfig(tensor=2, pipeline=2), 2),
        also(4, ParallelConfig(tensor=2), 4),
        also(4, ParallelConfig(pipeline=4), 2),
        also(8, ParallelConfig(tensor=4, pipeline=2), 2),
        also(8, ParallelConfig(tensor=2, pipeline=2), 4),
        pytest.param("qwen3", 4, ParallelConfig(tensor=2, pipeline=2), 1, marks=pytest.mark.ranks),
        pytest.param(
            "llama-tied-llama3-rope", 2, ParallelConfig(pipeline=2), 1, marks=pytest.mark.ranks
        ),
        pytest.param("qwen2", 4, ParallelConfig(tensor=2), 2, marks=pytest.mark.ranks),
        ("qwen2", 2, ParallelConfig(tensor=2), 2),
        pytest.param("phi3", 4, ParallelConfig(tensor=2), 2, marks=pytest.mark.ranks),
        pytest.param(
            "qwen3-tied",
            2,
            ParallelConfig(pipeline=2, virtual_pipeline=2),
            1,
            marks=pytest.mark.ranks,
        ),
    ],
)
def test_vllm_agrees_with_the_trainer_and_with_transformers(
    variant: str, world: int, parallel: ParallelConfig, engine_size: int, tmp_path: Path
) -> None:
    # vLLM's CPU attention starts at head size 32
    folder = save_tiny(tmp_path, variant, hidden_size=128)
    shared = Path(f"/dev/shm/-tp:0-[{'-'.join(map(str, range(engine_size)))}]-cpushm_1")
    if engine_size > 1:
        shared.touch()  # as a killed run leaves it
    results = run_ranks(world, agreement_body, folder, parallel, engine_size, timeout=300)
    assert not shared.exists()
    assert_agree(results)


@pytest.mark.parametrize(
    ("variant", "layout", "sizes", "targets"),
    [
        ("qwen3", ParallelConfig(tensor=2), {}, (*ALL, "embed_tokens", "lm_head")),
        pytest.param(
            "qwen3-moe",
            ParallelConfig(tensor=2, sequence=True, expert=2),
            {"moe_intermediate_size": 64},
            (),
            marks=pytest.mark.ranks,
        ),
    ],
)
def test_vllm_says_what_a_policy_with_adapters_says(
    variant: str,
    layout: ParallelConfig,
    sizes: dict[str, int],
    targets: tuple[str, ...],
    tmp_path: Path,
) -> None:
    folder = save_tiny(tmp_path / "model", variant, hidden_size=128, **sizes)
    pairs = random_pairs(folder, rank=8, targets=targets or ALL)
    adapter = write_pairs(tmp_path / "adapter", pairs, alpha=16)
    lora = LoRA(rank=8, alpha=16, targets=list(targets), path=str(adapter))
    assert_agree(run_ranks(2, agreement_body, folder, layout, 1, lora, timeout=300))


def assert_agree(results: list[Any]) -> None:
    for found in results:
        for version, turn in enumerate(found):
            assert turn["gap"] < 1e-5
            assert turn["versions"] == {version}
            assert turn["greedy"][0] == turn["greedy"][1]
            assert turn["answers"] == turn["mended"], "a restarted engine answers otherwise"
            assert turn["answers"] == turn["again"], "an answer depends on its place in the batch"
            for reason, length, last in turn["reasons"]:
                assert reason == ("stop" if last == STOP else "length")
                assert length <= 12
        assert found[0]["logp"] != found[1]["logp"], "the second push changed nothing"
    assert all(result == results[0] for result in results), "the processes have different answers"


def says_the_same(engine: Any, oracle: TransformersEngine) -> None:
    """Greedy answers, and the log-probs of their tokens."""
    one, other = (
        each.generate(PROMPTS, seeds=[0] * 3, sampling=Sampling(0.0)) for each in (engine, oracle)
    )
    assert [completion.token_ids for completion in one] == [
        completion.token_ids for completion in other
    ]
    for completion, wanted in zip(one, other, strict=True):
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), torch.tensor(wanted.logprobs), atol=2e-5, rtol=0
        )


def moe_body(world: Any, folder: Path, parallel: ParallelConfig) -> None:
    """Its parameters and its answers, over three pushes."""
    from rftmega.rollout.engines.vllm import VLLMEngine

    os.environ["LOCAL_WORLD_SIZE"] = str(world.size)
    config = RolloutConfig(
        tensor=world.size,
        max_prompt_tokens=32,
        max_response_tokens=12,
        cpu_cache_gib=0.05,
        max_batch=8,
    )
    manager = build_manager(folder, parallel)
    engine = VLLMEngine(folder, config, world, dtype="float32", stop_ids=[STOP])
    oracle = TransformersEngine(folder, config, stop_ids=[STOP], where=torch.device("cpu"))
    exporter = Exporter(manager.shards(), manager.topology.replica_group, bucket_bytes=50_000)
    weights = EngineWeights(manager.shards(), engine, bucket_bytes=50_000)
    recording = weights.recording
    assert recording is not None
    (model,) = engine._llm.apply_model(lambda model: model)

    def pushed(version: int) -> dict[str, torch.Tensor]:
        weights.push(version=version)
        oracle.load_weights(exporter, version=version)
        says_the_same(engine, oracle)
        return {
            name: parameter.clone()
            for name, parameter in model.named_parameters()
            if parameter.numel()
        }

    before = pushed(0)
    assert {name.rpartition(".")[2] for name in before} >= {"w13_weight", "w2_weight"}
    for version in (1, 2):
        with torch.no_grad():
            for item in manager.bound:
                item.parameter.mul_(1.1)
        copied = pushed(version)
        weights.recording = None
        loaded = pushed(version)
        weights.recording = recording
        assert all(
            torch.equal(copied[name].view(torch.int32), loaded[name].view(torch.int32))
            for name in loaded
        )
        assert not any(torch.equal(copied[name], before[name]) for name in before), (
            "the push changed nothing"
        )
        before = copied
    buckets = enumerate(weights.buckets)
    left = [
        (tensor, part)
        for number, bucket in buckets
        for tensor, part in recording.of_bucket(number, bucket.tensors, bucket.receives)[1]
    ]
    assert {tensor.names[part] for tensor, part in left} == {
        "model.embed_tokens.weight",
        "lm_head.weight",
    }, "vLLM fills their padding; all else is copied"
    dist.barrier()
    engine.close()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "parallel"),
    [(1, ParallelConfig()), (2, ParallelConfig(tensor=2, sequence=True, expert=2))],
)
def test_a_moe_models_experts_are_copied_as_vllms_own_loader_would(
    world: int, parallel: ParallelConfig, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, "qwen3-moe", hidden_size=128, moe_intermediate_size=64)
    run_ranks(world, moe_body, folder, parallel, timeout=300)


def family_body(
    world: Any, folder: Path, plain: Path | None = None, known: Path | None = None
) -> None:
    """vLLM's own loader, then again with other weights: those of `plain`, or the folder's.

    `known`: a folder of the same model that transformers reads.
    """
    from rftmega.rollout.engines.vllm import VLLMEngine

    config = RolloutConfig(
        max_prompt_tokens=32, max_response_tokens=12, cpu_cache_gib=0.05, max_batch=8
    )
    engine = VLLMEngine(folder, config, world, dtype="float32", stop_ids=[STOP])
    oracle = TransformersEngine(known or folder, config, stop_ids=[STOP], where=torch.device("cpu"))
    tensors = load_file((plain or folder) / "model.safetensors")
    for version in range(2):
        engine.load_weights(iter(tensors.items()), version=version)
        oracle.load_weights(tensors.items(), version=version)
        says_the_same(engine, oracle)
        tensors = {
            name: 1.2 * tensor if tensor.dim() > 1 else tensor for name, tensor in tensors.items()
        }
    engine.close()


LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("deepseek-v3", LATENT),
        pytest.param("deepseek-v3-yarn-plain-queries", LATENT, marks=pytest.mark.ranks),
        pytest.param("mixtral", {}, marks=pytest.mark.ranks),
        pytest.param("qwen3-moe-plain-weights", {}, marks=pytest.mark.ranks),
        pytest.param("qwen2-moe", {}, marks=pytest.mark.ranks),
        pytest.param("glm4-moe", {"head_dim": 64}, marks=pytest.mark.ranks),
    ],
)
def test_vllm_says_what_transformers_says_of_every_moe(
    variant: str, changes: dict[str, int], tmp_path: Path
) -> None:
    run_ranks(1, family_body, save_tiny(tmp_path, variant, hidden_size=128, **changes), timeout=300)


@pytest.mark.ranks
def test_vllm_says_of_kimi_k2_what_transformers_says_of_deepseek_v3(tmp_path: Path) -> None:
    one_group = LATENT | {"n_group": 1, "topk_group": 1, "hidden_size": 128}
    known = save_tiny(tmp_path / "known", "deepseek-v3", **one_group)
    named = plain_folder(known, tmp_path / "kimi", load_file(known / "model.safetensors"))
    fields = json.loads((known / "config.json").read_text())
    (named / "config.json").write_text(json.dumps(fields | {"model_type": "kimi_k2"}))
    run_ranks(1, family_body, named, None, known, timeout=300)


@pytest.mark.ranks
def test_an_engine_takes_plain_weights_for_a_folder_of_8_bit_numbers(tmp_path: Path) -> None:
    plain = save_tiny(tmp_path / "plain", "qwen3", hidden_size=128)
    quantise_folder(plain, tmp_path / "quantised", (32, 32))
    run_ranks(1, family_body, tmp_path / "quantised", plain, timeout=300)


def said(completions: Sequence[Completion]) -> list[tuple[tuple[int, ...], list[float]]]:
    return [(tuple(completion.token_ids), list(completion.logprobs)) for completion in completions]


def pushed_body(world: Any, folder: Path, parallel: ParallelConfig) -> Any:
    """Greedy answers of an engine over all processes, after a push."""
    from rftmega.rollout.engines.vllm import VLLMEngine

    os.environ["LOCAL_WORLD_SIZE"] = str(world.size)
    config = RolloutConfig(
        tensor=world.size,
        max_prompt_tokens=32,
        max_response_tokens=12,
        cpu_cache_gib=0.05,
        max_batch=8,
    )
    manager = build_manager(folder, parallel)
    engine = VLLMEngine(folder, config, world, dtype="float32", stop_ids=[STOP])
    EngineWeights(manager.shards(), engine, bucket_bytes=50_000).push(version=0)
    found = said(engine.generate(PROMPTS, seeds=[0] * 3, sampling=Sampling(0.0)))
    dist.barrier()
    engine.close()
    return found


def oracle_body(world: Any, folder: Path) -> Any:
    config = RolloutConfig(max_prompt_tokens=32, max_response_tokens=12)
    oracle = TransformersEngine(folder, config, stop_ids=[STOP], where=torch.device("cpu"))
    oracle.load_weights(load_file(folder / "model.safetensors").items(), version=0)
    return said(oracle.generate(PROMPTS, seeds=[0] * 3, sampling=Sampling(0.0)))


LONG_ROPE = {
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 700.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1 + 0.1 * place for place in range(12)],
        "long_factor": [2.0 + place for place in range(12)],
    },
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "variant",
    [
        "olmo2",
        "seed-oss",
        "arcee",
        "smollm3",
        "granite",
        "exaone4",
        "hunyuan",
        "gemma3",
        "phi4-mini",
    ],
)
def test_vllm_says_what_transformers_says_in_a_process_of_its_own(
    variant: str, tmp_path: Path
) -> None:
    """OLMo 2 runs on transformers' own classes in vLLM, which changes them for its process."""
    more = LONG_ROPE if variant == "phi4-mini" else {}
    folder = save_tiny(tmp_path, variant, hidden_size=128, **more)
    (wanted,) = run_ranks(1, oracle_body, folder)
    found = run_ranks(2, pushed_body, folder, ParallelConfig(pipeline=2), timeout=300)
    for (ids, logprobs), (wanted_ids, wanted_logprobs) in zip(
        next(filter(None, found)), wanted, strict=True
    ):
        assert ids == wanted_ids
        torch.testing.assert_close(
            torch.tensor(logprobs), torch.tensor(wanted_logprobs), atol=2e-5, rtol=0
        )


def many_body(world: Any, folder: Path) -> list[list[tuple[int, ...]]]:
    """Seeded answers to prompts of which a step takes one and a half: to all, and to each alone."""
    from rftmega.rollout.engines import vllm_models
    from rftmega.rollout.engines.vllm import VLLMEngine

    vllm_models.CPU_STEP_TOKENS = 45
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    config = RolloutConfig(
        max_prompt_tokens=30, max_response_tokens=4, cpu_cache_gib=0.05, max_batch=8
    )
    manager = build_manager(folder, ParallelConfig())
    engine = VLLMEngine(folder, config, world, dtype="float32", stop_ids=[STOP])
    EngineWeights(manager.shards(), engine, bucket_bytes=2**20).push(version=0)
    prompts = [Prompt((5, 9, *range(2 + place, 30 + place))) for place in range(12)]
    together = engine.generate(prompts, seeds=range(12), sampling=Sampling(1.0))
    alone = [
        engine.generate([prompt], seeds=[seed], sampling=Sampling(1.0))[0]
        for seed, prompt in enumerate(prompts)
    ]
    engine.close()
    return [
        [completion.token_ids for completion in completions] for completions in (together, alone)
    ]


def test_more_prompts_than_a_step_takes_are_answered_as_each_alone(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "qwen2", hidden_size=128)
    ((together, alone),) = run_ranks(1, many_body, folder, timeout=200)
    assert together == alone


def refused_body(world: Any, folder: Path) -> str:
    """What is said of a model at its start in vLLM, or of its first push."""
    from rftmega.rollout.engines.vllm import VLLMEngine

    os.environ["LOCAL_WORLD_SIZE"] = "1"
    config = RolloutConfig(max_prompt_tokens=8, max_response_tokens=4, cpu_cache_gib=0.05)
    try:
        engine = VLLMEngine(folder, config, world, dtype="float32", stop_ids=[STOP])
        engine.load_weights(load_file(folder / "model.safetensors").items(), version=0)
    except EngineError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        (
            "codegen",
            r"vLLM \S+ could not be started with .*CodeGenForCausalLM'\] are not supported for now \(.*set rollout.engine=tr",
        ),
        (  # its first step fails
            "phimoe",
            r"could not be started with .* unpack.* \(modeling_phimoe\.py:\d+\).*set rollout.eng",
        ),
        pytest.param(
            "dbrx",
            r"vLLM \S+ can't load the weights of .*KeyError.*Set rollout.engine=transformers",
            marks=pytest.mark.ranks,
        ),
    ],
)
def test_a_model_that_vllm_does_not_take_is_refused_with_another_engine_named(
    model_type: str, said: str, tmp_path: Path
) -> None:
    save_tiny_of(model_type, tmp_path, head=32)
    (found,) = run_ranks(1, refused_body, tmp_path)
    assert re.search(said, found), found
