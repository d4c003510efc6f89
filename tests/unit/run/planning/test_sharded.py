"""A plan of FSDP2 against torch's own blocks and sums made by hand; tests/distributed/test_plan.py
measures.
"""

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rftmega import config as configuration
from rftmega.backends.decoder.gathered_groups import Groups
from rftmega.config import LoRA, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig
from rftmega.core.errors import CheckpointError
from rftmega.run import disk_space
from rftmega.run.planning import backends, engine, memory, times
from rftmega.run.planning.backends import Best, best_of, on_backend, recommended
from rftmega.run.planning.fit import Machine, misfits, refused
from rftmega.run.planning.memory import Budget, load_of
from rftmega.run.planning.models import POLICY, PlannedModel, models_of
from rftmega.run.planning.search import found_layout
from rftmega.run.planning.sharded import elements_of, frozen_bytes, gathered, pairs_of, states
from rftmega.run.planning.times import Speeds
from tests.tiny_decoders import save_decoder

GB = 1e9
EXAMPLES = Path(__file__).parents[4] / "examples/planning"
SPEEDS = Speeds(989e12, 3350 * GB, 450 * GB, 50 * GB, 50 * GB, 8)
P = ParallelConfig
SMALL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}  # Qwen3-0.6B


def config_of(path: Path, parallel: ParallelConfig, dtype: str = "bfloat16") -> RunConfig:
    config = RunConfig(backend="fsdp", model=ModelConfig(path=str(path), dtype=dtype))
    config.parallel = config.critic.parallel = parallel
    config.rollout.max_prompt_tokens, config.rollout.max_response_tokens = 512, 1536
    config.trainer.prompts_per_step, config.trainer.offload = 128, True
    return config


def small(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(SMALL))
    return folder


def example(name: str) -> RunConfig:
    path = f"model.path={EXAMPLES / name}"
    return configuration.load(EXAMPLES / name / "run.yaml", [path])


def machine(devices: int, memory: float = 80) -> Machine:
    return Machine(devices, Budget(memory * GB, 4 * GB), SPEEDS)


@pytest.mark.parametrize(
    ("name", "shards"),
    [
        ("llama-3-70b", 3),
        pytest.param("llama-3-70b", 1, marks=pytest.mark.ranks),
        pytest.param("llama-3-70b", 64, marks=pytest.mark.ranks),
        ("qwen3-235b-a22b", 64),
        pytest.param("qwen3-235b-a22b", 1, marks=pytest.mark.ranks),
        pytest.param("qwen3-235b-a22b", 3, marks=pytest.mark.ranks),
    ],
)
def test_a_process_has_the_first_of_torchs_blocks_of_every_parameter(
    name: str, shards: int
) -> None:
    planned = models_of(config_of(EXAMPLES / name, P()))[POLICY]
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(EXAMPLES / name)
        parameters = list(AutoModelForCausalLM.from_config(config).parameters())
    assert planned.groups is not None
    first = sum(parameter.chunk(shards)[0].numel() for parameter in parameters)
    assert elements_of(planned.groups, shards) == first
    held = states(planned, 2 * shards)
    halved = elements_of(planned.groups, 2 * shards)
    assert list(held.values()) == [(4 + 2) * halved, 4 * halved, 0, 8 * halved]


def test_processes_that_share_matrices_have_equal_parts_of_them_and_all_norms() -> None:
    planned = models_of(config_of(EXAMPLES / "llama-3-70b", P()))[POLICY]
    shared = planned.with_layout(P(tensor=8), planned.optimizer)
    assert planned.groups is not None
    assert shared.groups is not None
    shapes = [
        *planned.groups.whole_pass,
        *(shape for each in planned.groups.apart for shape in each),
    ]
    matrices = sum(prod(shape) for shape in shapes if len(shape) > 1)
    norms = sum(prod(shape) for shape in shapes if len(shape) == 1)
    assert elements_of(shared.groups, 1) == matrices / 8 + norms
    assert states(shared, 64)["gradients"] == 4 * elements_of(shared.groups, 8)
    assert shared.with_layout(P(), planned.optimizer).groups == planned.groups


def test_a_number_of_processes_that_cannot_share_a_model_is_no_layout() -> None:
    config = config_of(EXAMPLES / "llama-3-70b", P(tensor=16))  # it has 8 key-value heads
    models = models_of(config_of(EXAMPLES / "llama-3-70b", P()))
    found = refused(models, config, machine(64))
    assert any("does not divide the 8 heads (num_key_value_heads)" in reason for reason in found)
    with pytest.raises(CheckpointError, match="does not divide the 8 heads"):
        models_of(config)


def planned_of(parallel: ParallelConfig, itemsize: int) -> PlannedModel:
    """An embedding, three layers and a head of 10 x 4 and so on, and a norm."""
    groups = Groups((((10, 4),), ((8, 4), (4, 2)), ((8, 4), (4, 2)), ((10, 4),)), ((4,),))
    described = SimpleNamespace(experts=None)
    optimizer = OptimizerConfig()
    return PlannedModel(
        described,  # type: ignore[arg-type]
        (),
        parallel,
        optimizer,
        value=False,
        itemsize=itemsize,
        narrow_whole=False,
        groups=groups,
    )


def test_what_a_pass_gathers_is_the_sum_of_what_torch_keeps_at_once() -> None:
    """Of two layers of 40 elements between matrices of 40; the norm is there all the time."""
    wide, narrow = planned_of(P(), 4), planned_of(P(), 2)
    # the buffer of the one before, that of this one, and the parameters
    assert gathered(wide, 2, learns=False) == 4 * (40 + 40 + 40 + 4)
    assert gathered(narrow, 2, learns=False) == 2 * (40 + 40 + 40 + 4)
    # one that comes, parameters, their gradients, gradients of the one behind in float32
    assert gathered(wide, 2, learns=True) == 4 * (40 + 40 + 40 + 40 + 2 * 4)
    assert gathered(narrow, 2, learns=True) == 2 * (40 + 40 + 40 + 2 * 4) + 4 * 40
    # with ZeRO-2 all are there, and none comes in the backward pass
    kept = planned_of(P(reshard_after_forward=False), 4)
    assert gathered(kept, 2, learns=False) == 4 * (4 * 40 + 2 * 40 + 4)
    assert gathered(kept, 2, learns=True) == 4 * (4 * 40 + 40 + 40 + 2 * 4)
    # where nothing is sharded there is nothing to come
    assert gathered(planned_of(P(replicas=2), 4), 2, learns=False) == 4 * (40 + 4)


def test_a_frozen_model_has_no_gradients_among_what_is_gathered() -> None:
    """The same with adapters of rank 1 on the first matrix of each layer: 4 + 8 elements."""
    plain = planned_of(P(), 2)
    assert plain.groups is not None
    pair = ((1, 4), (8, 1))
    groups = plain.groups._replace(pairs=((), pair, pair, ()))
    planned = replace(plain, groups=groups)
    both = 40 + 2 * 4 + 8  # one process has the only row of A, and both have memory for one
    # both buffers and the layer
    assert gathered(planned, 2, learns=False) == 2 * (3 * both + 4)
    # gradients of pairs are less than the second buffer of the pass before; the norm has none
    assert gathered(planned, 2, learns=True) == gathered(planned, 2, learns=False)
    own = 2 * (4 + 4)  # of two pairs, a row of A and half of B
    assert states(planned, 2) == {
        "parameters": 2 * (4 * 20 + 2 + 2 * 4) + (4 + 2) * own,
        "gradients": 4 * own,
        "main_parameters": 0,
        "adam": 8 * own,
    }


def test_with_cpu_offload_the_host_has_what_the_device_has_not(tmp_path: Path) -> None:
    config = config_of(small(tmp_path), P(cpu_offload=True))
    models, stages = models_of(config), {POLICY: 0}
    held = states(models[POLICY], 8)
    phases = memory.on_device(models, config, 8, stages, Budget(80 * GB), 0)
    assert phases["update"].keys() & held.keys() <= {"parameters"}
    assert phases["update"].get("parameters", 0) == 0
    assert phases["update"]["gathered"] > 0
    assert memory.on_host(models, config, 8, stages)["sharded"] == sum(held.values())


def test_gathers_take_time_only_beyond_the_computation(tmp_path: Path) -> None:
    config = config_of(small(tmp_path), P(replicas=2))
    models = models_of(config)
    elements = elements_of(models[POLICY].groups or Groups((), ()), 8)
    micro_batches = load_of(config, config.parallel, 16).micro_batches
    found = times.seconds(models, config, 16, None, None, SPEEDS)["update"]
    gathers = 2 * micro_batches * 2 * elements * 7 / (450 * GB)  # before each pass, bfloat16
    reduced = micro_batches * 4 * elements * 7 / (450 * GB)
    replicas = 2 * 4 * elements * 1 / 2 / (50 * GB)  # once, between nodes
    slow = Speeds(
        1e30, *(getattr(SPEEDS, name) for name in ("memory", "nvlink", "nic", "host", "node"))
    )
    exposed = times.seconds(models, config, 16, None, None, slow)["update"]["gathers"]
    assert exposed == pytest.approx(gathers + reduced + replicas)
    assert found["gathers"] == pytest.approx(max(0.0, exposed - found["compute"]))
    assert found["compute"] > 0


def test_completions_of_a_prompt_on_one_rank_compute_it_once(tmp_path: Path) -> None:
    """4 prompts of 8 completions: 16 ranks have 2 completions of one prompt each."""
    config = config_of(small(tmp_path), P())
    config.trainer.prompts_per_step, config.rollout.samples_per_prompt = 4, 8
    models = models_of(config)

    def compute(share: bool, world: int) -> float:
        config.trainer.share_prefixes = share
        return times.seconds(models, config, world, None, None, SPEEDS)["score"]["compute"]

    for world, together in ((1, 8), (4, 8), (16, 2), (32, 1), (64, 1)):
        once = (512 + together * 1536) / (together * 2048)
        assert compute(True, world) == pytest.approx(once * compute(False, world))


def test_a_family_that_no_table_knows_is_planned_too(tmp_path: Path) -> None:
    """Cohere: weights of the engine by shape, free disk space by count."""
    folder = save_decoder(tmp_path, "cohere")
    config = config_of(folder, P(), dtype="float32")
    config.checkpoint.every = 5
    planned = models_of(config)[POLICY]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    counted = sum(map(prod, shapes))
    assert planned.model.parameters == counted
    halved = sum(prod(shape) // (2 if len(shape) == 2 else 1) for shape in shapes)
    assert engine.weight_bytes(planned, 2) == 2 * halved
    checkpoints = f"{config.trainer.output}/checkpoints"
    assert disk_space.needed(config)[checkpoints] == counted * (4 + 8)


def test_the_nearest_that_fits_is_one_of_fsdp(tmp_path: Path) -> None:
    config = config_of(EXAMPLES / "llama-3-70b", P())
    config.rollout.tensor = 8
    where = machine(64)
    models = models_of(config)
    assert refused(models, config, where) == []
    assert misfits(models, config, where, 0)
    proposal = found_layout(models, config, where, "nearest").proposal
    assert proposal is not None
    assert proposal.changes.keys() <= {"parallel.recompute", "trainer.max_tokens_per_micro_batch"}


def test_a_backend_is_recommended_for_a_reason(tmp_path: Path) -> None:
    few = recommended(config_of(small(tmp_path), P()), machine(8))
    assert few.backend == "fsdp"
    assert "less to choose" in few.why
    many = recommended(example("llama-3-70b"), machine(64))
    assert many.backend == "megatron"
    assert "times as long" in many.why
    assert min(best.seconds for best in many.best.values()) > 0
    (tmp_path / "cohere").mkdir()
    unknown = recommended(config_of(save_decoder(tmp_path / "cohere", "cohere"), P()), machine(8))
    assert unknown.backend == "fsdp"
    assert "cohere" in unknown.why


@pytest.mark.ranks
def test_processes_share_experts_under_fsdp_where_the_whole_would_be_gathered() -> None:
    sparse = recommended(example("deepseek-v3"), machine(512))
    assert sparse.backend == "megatron"
    sharded = sparse.best["fsdp"].config
    assert sharded is not None
    assert sharded.parallel.tensor > 1  # to gather less of each expert


@pytest.mark.parametrize(("fitting", "other"), [("megatron", "fsdp"), ("fsdp", "megatron")])
def test_a_backend_without_a_layout_that_fits_is_not_recommended(
    fitting: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = {fitting: Best(RunConfig(), 5.0), other: Best(None, 0.0, "gathered 90 GB")}
    monkeypatch.setattr(backends, "best_of", lambda config, machine: of[config.backend])
    found = recommended(config_of(small(tmp_path), P()), machine(8))
    assert found.backend == fitting
    assert "gathered 90 GB" in found.why


def test_adapters_that_a_backend_cannot_have_are_why_it_has_no_layout() -> None:
    config = example("qwen3-235b-a22b")
    config.model.lora = LoRA(rank=16, targets=["linear_qkv"])  # a name of Megatron's
    best = best_of(on_backend(config, "fsdp"), machine(256))
    assert best.config is None
    assert "linear_qkv can't have an adapter in this model" in best.why
    config.model.lora = LoRA(rank=16)
    assert best_of(on_backend(config, "fsdp"), machine(256)).config is not None


def test_adapters_of_experts_are_counted_by_hand() -> None:
    """Of Qwen3-30B-A3B, 48 layers of 128 experts of 768: docs/adapters.md has the sum."""
    config = config_of(EXAMPLES / "qwen3-30b-a3b", P())
    config.model.lora = LoRA(rank=16, targets=["gate_proj", "up_proj", "down_proj"])
    plain = models_of(config)[POLICY]
    assert plain.groups is not None
    experts = 48 * 128 * 3 * 16 * (2048 + 768)
    assert pairs_of(plain.groups, 1) == experts
    assert pairs_of(plain.groups, 64) == experts / 64
    # nothing is gathered to merge experts: the frozen weights of an eighth are an eighth
    held = [frozen_bytes(plain, world) for world in (8, 64)]
    assert held[0] == pytest.approx(8 * held[1], rel=1e-6)


def test_adapters_of_words_are_counted_by_hand() -> None:
    config = config_of(EXAMPLES / "qwen3-8b", P())
    plain = models_of(config)[POLICY]
    config.model.lora = LoRA(rank=16, targets=["embed_tokens", "lm_head"])
    planned = models_of(config)[POLICY]
    assert planned.groups is not None
    assert plain.groups is not None
    of_each = 16 * (151_936 + 4096)
    assert pairs_of(planned.groups, 1) == 2 * of_each
    # by one process of 8: of the embedding's pair both are whole once more, of the head's A alone
    frozen = elements_of(plain.groups, 8)
    assert frozen_bytes(planned, 8) == 2 * (frozen + of_each + 16 * 4096)


def test_of_a_critic_with_adapters_they_and_its_head_alone_learn_on_fsdp_as_well() -> None:
    config = config_of(EXAMPLES / "qwen3-8b", P())
    config.model.lora = LoRA(rank=16, targets=["q_proj"])
    config.algorithm.task = "reward_model"
    planned = models_of(config)[POLICY]
    pairs, head = 36 * 16 * (4096 + 4096), 4096
    held = states(planned, 1)
    assert held["gradients"] == 4 * (pairs + head)
    assert held["adam"] == 8 * (pairs + head)
    frozen = 8_190_735_360 - 151_936 * 4096  # of what is published, the head of words
    whole = 36 * 16 * 4096  # of each A once more
    assert held["parameters"] == 2 * (frozen + whole) + 6 * (pairs + head)


def test_the_other_backend_is_looked_at_without_this_ones_options() -> None:
    config = config_of(EXAMPLES / "llama-3-70b", P(replicas=2))
    config.backend, config.parallel = "megatron", P(tensor=8, sequence=True, pipeline=4)
    config.optimizer.distributed = config.optimizer.overlap_grad_reduce = True
    other = on_backend(config, "fsdp")
    assert (other.parallel, other.critic.parallel) == (P(), P())
    assert other.optimizer.distributed, "which is the default, and says nothing there"
    assert not other.optimizer.overlap_grad_reduce
    assert config.parallel.tensor == 8
    assert best_of(on_backend(other, "megatron"), machine(8, memory=10)).config is None
