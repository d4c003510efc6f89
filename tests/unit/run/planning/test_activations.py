"""Activations against the formulas of arXiv:2205.05198 and against what torch really keeps."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rftmega.backends.decoder.gathered_groups import Groups
from rftmega.config import ParallelConfig, RolloutConfig, RunConfig, TrainerConfig
from rftmega.model_providers.description import describe
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.models.kernels.linear_log_probs import VocabularyShard, linear_stats
from rftmega.run.planning import activations, engine
from rftmega.run.planning.activations import Load, chunks_in_flight, layer_bytes
from rftmega.run.planning.memory import load_of
from rftmega.run.planning.models import PlannedModel
from tests.allocations import most_bytes
from tests.tiny_models import save_tiny
from tests.unit.run.planning.test_states import planned

P = ParallelConfig


@pytest.mark.parametrize(("stages", "chunks"), [(4, 1), (4, 2), (8, 5)])
def test_the_first_stage_keeps_what_the_paper_says(stages: int, chunks: int) -> None:
    """All L layers for 1F1B; with m chunks a stage L (1 + (p - 1) / (p m)) (section 4.2.3)."""
    kept = chunks_in_flight(P(pipeline=stages, virtual_pipeline=chunks), 0, 1000) / (
        stages * chunks
    )
    assert kept == pytest.approx(1 + (stages - 1) / (stages * chunks) if chunks > 1 else 1)


def test_later_stages_and_few_micro_batches_keep_less() -> None:
    assert [chunks_in_flight(P(pipeline=4), stage, 100) for stage in range(4)] == [4, 3, 2, 1]
    assert [chunks_in_flight(P(pipeline=4), stage, 2) for stage in range(4)] == [2, 2, 2, 1]


def test_sequence_parallelism_divides_all_of_a_layer_and_tensor_parallelism_not_the_norms() -> None:
    """Equations 2 and 4: with t processes sbh (10 + 24 / t) becomes sbh 34 / t."""
    model = planned("llama-3-70b", P()).model
    alone, tensor, sequence = (layer_bytes(model, parallel, 0, 2) for parallel in
                               (P(), P(tensor=8), P(tensor=8, sequence=True)))  # fmt: skip
    norms = 4 * 2 * model.hidden + 8
    assert sequence == pytest.approx(alone / 8)
    assert tensor == pytest.approx(norms + (alone - norms) / 8)


def without_head(parallel: ParallelConfig) -> PlannedModel:
    return replace(planned("llama-3-70b", parallel), value=True)


def test_full_recomputation_keeps_a_layers_input_only() -> None:
    """2 sbh a layer (section 5), and one layer at work: what it kept, and the gradients of its MLP."""
    load = Load(tokens=4096, micro_batches=8)
    kept, recomputed = (
        activations.training(without_head(P(recompute=how)), 0, load) for how in ("none", "full")
    )
    layer = 4096 * layer_bytes(planned("llama-3-70b", P()).model, P(), 0, 2)
    work = 4096 * 2 * (8192 + 4 * 28672)
    rows = 4096 * (activations.PLACES + activations.LOSS)
    assert recomputed == pytest.approx(79 * 2 * 8192 * 4096 + layer + work + rows)
    assert kept == pytest.approx(80 * layer + work + rows)


def test_context_parallelism_gathers_keys_and_values_of_the_whole_row() -> None:
    """8 groups of 128 numbers in bfloat16, twice; in the backward pass also their gradients, twice.
    All else is of the process's own tokens.
    """
    load = Load(tokens=131_072, micro_batches=1)
    rows = load.tokens * (activations.PLACES + activations.LOSS)
    some, many = (
        activations.training(without_head(P(context=processes)), 0, load) - rows
        for processes in (64, 128)
    )
    assert 2 * many - some == pytest.approx(131_072 * 3 * 2 * 8 * 128 * 2)


def test_a_step_holds_a_layers_gradients_or_the_heads_but_not_both() -> None:
    load = Load(tokens=4096, micro_batches=8)
    policy, values = planned("llama-3-70b", P()), without_head(P())
    stored = 80 * 4096 * layer_bytes(policy.model, P(), 0, 2)
    rows = 4096 * (activations.PLACES + activations.LOSS)
    head = activations.log_probs(policy, load, learns=True) + 4096 * 2 * 8192  # the last norm's
    assert activations.training(policy, 0, load) == pytest.approx(stored + head + rows)
    assert activations.training(values, 0, load) < stored + head + rows
    scored = activations.log_probs(policy, load, learns=False)
    layer = 4096 * 2 * (4 * 8192 + 4 * 28672)
    assert activations.scoring(policy, 0, load) == pytest.approx(
        max(scored, layer) + 4096 * activations.PLACES
    )


def test_the_norms_of_transformers_compute_in_float32() -> None:
    """Where tensor parallelism leaves little of an MLP, a norm's backward pass is the peak: five
    numbers an element, of which an MLP of 1/8 has freed its own.
    """
    policy = replace(without_head(P(tensor=8)), groups=Groups((), ()))
    load = Load(tokens=4096, micro_batches=1)
    found = activations.training(policy, 0, load)
    layer = layer_bytes(policy.model, policy.parallel, 0, 2, "transformers")
    rows = 4096 * (activations.PLACES + activations.LOSS)
    norm = 8192 * (6 + 2 + 20)  # the last one's, which frees nothing before
    assert found == pytest.approx(4096 * (80 * layer + norm + 4) + rows, rel=1e-3)


def test_experts_cost_as_many_as_a_token_goes_to() -> None:
    dense = planned("deepseek-v3", P()).model
    assert dense.experts is not None
    sparse, plain = layer_bytes(dense, P(), 3, 2), layer_bytes(dense, P(), 0, 2)
    routed = 8 * (2 * 7168 + 4 * 2048) * 2 + 3 * 4 * 256
    assert sparse - plain == pytest.approx(routed + 4 * 2048 * 2 - 4 * 18432 * 2)


@pytest.mark.parametrize(
    ("dtype", "learns"),
    [
        (torch.float32, False),
        (torch.bfloat16, True),
        pytest.param(torch.float32, True, marks=pytest.mark.ranks),
        pytest.param(torch.bfloat16, False, marks=pytest.mark.ranks),
    ],
)
def test_log_probs_hold_what_torch_really_holds(dtype: torch.dtype, learns: bool) -> None:
    tokens, hidden_size, words = 3 * 1024, 64, 8192
    policy = planned("llama-3-70b", P())
    small = replace(
        policy,
        model=replace(policy.model, hidden=hidden_size, vocabulary=words),
        itemsize=dtype.itemsize,
    )
    hidden = torch.randn(tokens, hidden_size, dtype=dtype)
    weight = torch.randn(words, hidden_size, dtype=dtype, requires_grad=learns)

    def work() -> None:
        given = hidden.clone().requires_grad_(learns)
        found = linear_stats(
            given,
            weight,
            torch.zeros(tokens, dtype=torch.int64),
            1.0,
            VocabularyShard(0, words, None),
        )
        if learns:
            sum(found).sum().backward()

    predicted = activations.log_probs(small, Load(tokens, 1), learns=learns)
    assert most_bytes(work) == pytest.approx(predicted, rel=0.03)


def test_an_engine_samples_from_logits_and_probabilities_in_float32() -> None:
    """Llama-3-70B over 8 processes: 8192 tokens in bfloat16 through a layer, and a row of 128256
    numbers twice a sequence.
    """
    model = planned("llama-3-70b", P()).model
    layer = 8192 * (4 * 8192 + 3 * 28672 // 8) * 2
    assert engine.working_bytes(model, 8, 256) == layer + 256 * 128256 * (4 + 4)


@pytest.mark.parametrize(
    ("parallel", "world", "load"),
    [
        (ParallelConfig(), 1, Load(16_000, 4)),  # 64 rows of 1000 tokens, 16 of which fit
        (ParallelConfig(pipeline=4), 4, Load(8_000, 8)),  # two a stage
        (ParallelConfig(pipeline=4), 16, Load(2_000, 8)),
        (ParallelConfig(pipeline=4), 64, Load(1_000, 4)),  # there are no more rows
    ],
)
def test_a_pipeline_is_planned_with_as_many_micro_batches_as_it_gets(
    parallel: ParallelConfig, world: int, load: Load
) -> None:
    config = RunConfig(
        rollout=RolloutConfig(max_prompt_tokens=400, max_response_tokens=600, samples_per_prompt=8),
        trainer=TrainerConfig(prompts_per_step=8, max_tokens_per_micro_batch=16_384),
    )
    assert load_of(config, parallel, world) == load


def test_an_engine_of_8_bits_holds_a_byte_a_number_of_its_linear_layers() -> None:
    """Llama-3-70B over 8 processes: 80 layers, hidden 8192, feed-forward 28672, 64 heads and 8 groups of
    128, a vocabulary of 128256.
    """
    policy = planned("llama-3-70b", P())
    linear = 80 * 8192 * (2 * 64 * 128 + 2 * 8 * 128 + 3 * 28672) // 8
    rest = 2 * 128256 * 8192 // 8 + (2 * 80 + 1) * 8192
    plain = RolloutConfig(tensor=8)
    assert engine.held_bytes(policy, plain) == 2 * (linear + rest)
    held = engine.held_bytes(policy, replace(plain, quantization="fp8"))
    assert held == pytest.approx(linear * (1 + 4 / 128**2) + 2 * rest, abs=1.0)


def test_an_engine_caches_keys_and_values_of_layers_with_attention_only(tmp_path: Path) -> None:
    model = describe(read_hf_config(save_tiny(tmp_path, "qwen3.5")))
    assert model.attention_layers == 1
    assert engine.cache_bytes(model, 2) == 2 * 1 * 32 * 2  # keys and values of one head, 2 bytes
