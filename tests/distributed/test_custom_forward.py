"""`custom_forward` with the arguments that RLinf's users know, one process and several."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from rftmega.backends.megatron import MegatronModelManager
from rftmega.backends.megatron.forward import LogProbs
from rftmega.config import ParallelConfig
from tests.layouts import build_critic, build_manager
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny, transformers_logits

P = ParallelConfig
ROWS = [[5, 9, 130, 2, 77], [3, 0], [(37 * i) % 131 for i in range(12)]]
LENGTHS = torch.tensor([len(row) for row in ROWS])


def grid(*, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask) [3, 14], padded on the left or on the right with an id that is a word."""
    ids, mask = torch.full((3, 14), 7), torch.zeros(3, 14, dtype=torch.bool)
    for b, row in enumerate(ROWS):
        place = slice(14 - len(row), 14) if left else slice(0, len(row))
        ids[b, place], mask[b, place] = torch.tensor(row), True
    return ids, mask


def logits_body(world: Any, folder: Path, parallel: ParallelConfig) -> Any:
    manager = build_manager(folder, parallel)
    manager.chunks[0].eval()
    found = {}
    with torch.no_grad():
        for left in (False, True):
            for arguments in ({}, {"pack_seqs": False}, {"padding_seqlen": 64}):
                ids, mask = grid(left=left)
                logits = MegatronModelManager.custom_forward(
                    manager.chunks[0],
                    ids,
                    mask,
                    None,
                    parallel.sequence,
                    temperature=0.5,
                    **arguments,
                )
                assert logits.shape[:2] == ids.shape
                found[left, *arguments] = (
                    gather_from_tensor_model_parallel_region(logits)[..., :131],
                    mask,
                )
    return found


@pytest.mark.parametrize("parallel", [P(tensor=2, sequence=True), P(context=2)])
def test_logits_come_back_where_the_tokens_were_packed_or_padded(
    parallel: ParallelConfig, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, "qwen3")
    wanted = torch.cat(transformers_logits(folder, ROWS)) / 0.5
    for found in run_ranks(parallel.tensor * parallel.context, logits_body, folder, parallel):
        assert len(found) == 6
        for case, (logits, mask) in found.items():
            assert (logits[mask] - wanted).abs().max() < 2e-5, case
            assert logits[~mask].abs().max() == 0, case


def processor_body(world: Any, folder: Path, parallel: ParallelConfig) -> Any:
    manager = build_manager(folder, parallel)
    seen = []

    def best(logits: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        seen.append((tuple(logits.shape), tuple(weight.shape)))
        return {"best": logits.max(-1).values * weight, "weight": weight}

    ids, mask = grid(left=True)
    weight = torch.arange(42.0).reshape(3, 14)
    temperature = torch.tensor([0.5, 1.0, 2.0])
    with torch.no_grad():
        found = manager.custom_forward(
            manager.chunks[0], ids, mask, mask.cumsum(1) - 1, False,
            logits_processor=best, logits_processor_args={"weight": weight}, temperature=temperature,
        )  # fmt: skip
    return found, seen


def test_a_processor_sees_packed_logits_and_arguments_and_its_answers_come_back_in_rows(
    tmp_path: Path,
) -> None:
    folder = save_tiny(tmp_path, "qwen2")
    found, seen = run_ranks(1, processor_body, folder, P())[0]
    assert seen == [((19, 131), (19,))]
    _, mask = grid(left=True)
    weight = torch.arange(42.0).reshape(3, 14)
    assert torch.equal(found["weight"], weight * mask)
    for b, logits in enumerate(transformers_logits(folder, ROWS)):
        wanted = (logits / [0.5, 1.0, 2.0][b]).max(-1).values * weight[b][mask[b]]
        torch.testing.assert_close(found["best"][b][mask[b]], wanted, atol=1e-4, rtol=1e-5)


def row_temperatures_body(world: Any, folder: Path, parallel: ParallelConfig) -> Any:
    manager = build_manager(folder, parallel)
    manager.chunks[0].eval()
    ids, mask = grid(left=True)
    with torch.no_grad():
        return manager.custom_forward(
            manager.chunks[0], ids, mask, None, parallel.sequence, logits_processor=LogProbs(131),
            logits_processor_args={"targets": ids.roll(-1, 1)}, temperature=torch.tensor([0.5, 1.0, 2.0]),
        ), ids.roll(-1, 1), mask  # fmt: skip


@pytest.mark.parametrize(
    "parallel",
    [P(), pytest.param(P(tensor=2, context=2, sequence=True), marks=pytest.mark.ranks)],
)
def test_log_probs_without_logits_take_a_temperature_a_row(
    parallel: ParallelConfig, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, "qwen3")
    wanted = [
        x / t for x, t in zip(transformers_logits(folder, ROWS), [0.5, 1.0, 2.0], strict=True)
    ]
    for found, targets, mask in run_ranks(
        parallel.tensor * parallel.context, row_temperatures_body, folder, parallel
    ):
        for b, logits in enumerate(wanted):
            logp = logits.log_softmax(-1)
            picked = logp.gather(-1, targets[b][mask[b]][:, None])[:, 0]
            torch.testing.assert_close(found["logp"][b][mask[b]], picked, atol=2e-5, rtol=1e-5)
            torch.testing.assert_close(
                found["entropy"][b][mask[b]], -(logp.exp() * logp).sum(-1), atol=2e-5, rtol=1e-5
            )


def value_body(world: Any, folder: Path) -> Any:
    critic = build_critic(folder, P())
    with torch.no_grad():
        critic.manager.chunks[0].value_head.weight.fill_(0.1)
        ids, mask = grid(left=True)
        return critic.manager.custom_forward(
            critic.manager.model[0], ids, mask, None, False, value_model=True
        ), mask


def test_a_value_model_gives_one_number_a_token(tmp_path: Path) -> None:
    values, mask = run_ranks(1, value_body, save_tiny(tmp_path, "qwen3"))[0]
    assert values.shape == mask.shape
    assert (values[mask] != 0).all()
    assert (values[~mask] == 0).all()


def refusals_body(world: Any, folder: Path) -> list[str]:
    manager = build_manager(folder, P())
    ids, mask = grid(left=False)
    said = []
    for positions, sequence_parallel, arguments in (
        (None, True, {}),
        (None, False, {"max_batch_seqlen": 18}),
        (None, False, {"padding_seqlen": 18}),
        (torch.arange(14).expand(3, 14) + 1, False, {}),
    ):
        try:
            manager.custom_forward(
                manager.chunks[0], ids, mask, positions, sequence_parallel, **arguments
            )
        except ValueError as error:
            said.append(str(error))
    return said


def test_what_it_cannot_do_it_says(tmp_path: Path) -> None:
    said = run_ranks(1, refusals_body, save_tiny(tmp_path, "qwen3"))[0]
    for text, words in zip(
        said,
        (
            "model was built with False",
            "19 tokens are more than max_batch_seqlen=18",
            "can't be padded to 18",
            "count from 0",
        ),
        strict=True,
    ):
        assert words in text


def test_one_iterator_a_chunk_and_padding_to_the_longest() -> None:
    batches = [
        {"ids": torch.ones(2, 3), "scale": torch.ones(2)},
        {"ids": torch.ones(1, 5), "scale": torch.ones(1)},
    ]
    one, two = MegatronModelManager.make_data_iterator_list(iter(batches), vpp_size=2)
    assert [b["ids"].shape[1] for b in one] == [b["ids"].shape[1] for b in two] == [3, 5]
    (only,) = MegatronModelManager.make_data_iterator_list(iter(batches), padding=True)
    padded = list(only)
    assert [tuple(b["ids"].shape) for b in padded] == [(2, 5), (1, 5)]
    assert padded[0]["ids"].sum() == 6
    assert padded[0]["scale"].shape == (2,)
