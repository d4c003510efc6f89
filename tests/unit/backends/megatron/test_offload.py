"""A model's parts on an imitation of CUDA: what is copied, what is pinned, and that nothing is lost
on the way.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rftmega.backends.megatron.manager import MegatronModelManager
from rftmega.models.kernels.packed_weights import pack
from rftmega.runtime.device.held_weights import AveragedWeights, ReferenceWeights
from rftmega.runtime.device.residency import (
    ADAM,
    GRADIENTS,
    MAIN_PARAMETERS,
    PARAMETERS,
    PARTS,
    Loan,
    Residency,
)
from tests.imitation_cuda import ImitationCUDA, imitated

SIZES = (5, 1000, 64)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[ImitationCUDA]:
    with imitated(monkeypatch) as found:
        yield found


@pytest.fixture
def parts() -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {
        part: [torch.randn(size) for size in SIZES] for part in (GRADIENTS, MAIN_PARAMETERS, ADAM)
    }
    return found | {
        PARAMETERS: [torch.nn.Parameter(torch.randn(size).bfloat16()) for size in SIZES]
    }


@pytest.fixture
def residency(parts: dict[str, list[Tensor]]) -> Residency:
    return Residency(lambda: parts)


def size_of(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def copies(parts: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
    return {
        part: Tensors(tensor.detach().clone() for tensor in tensors)
        for part, tensors in parts.items()
    }


class Tensors(list[Tensor]):
    """Compares without showing: pytest would read memory that a mistake has freed."""

    def __repr__(self) -> str:
        return f"{len(self)} tensors"


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    there = [x.untyped_storage().nbytes() >= x.nbytes for x in (*ours, *theirs)]
    return all(there) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_three_cycles_leave_every_bit_and_gradients_come_back_as_zeros(
    cuda: ImitationCUDA, parts: dict[str, list[Tensor]], residency: Residency
) -> None:
    before = copies(parts)
    for _ in range(3):
        residency.only()
        assert residency.bytes() == dict.fromkeys(parts, 0)
        residency.only(*PARTS)
        for part in (PARAMETERS, MAIN_PARAMETERS, ADAM):
            assert same(parts[part], before[part]), part
        assert same(parts[GRADIENTS], Tensors(torch.zeros_like(x) for x in before[GRADIENTS]))
        residency.changed()


def test_gradients_have_no_copy_on_the_host(
    cuda: ImitationCUDA, parts: dict[str, list[Tensor]], residency: Residency
) -> None:
    residency.only()
    assert residency.bytes() == dict.fromkeys(parts, 0)
    residency.on(*PARTS)
    kept = size_of(*parts[PARAMETERS], *parts[MAIN_PARAMETERS], *parts[ADAM])
    assert cuda.copied_to_host == kept
    assert kept <= cuda.pinned <= kept + 256 * 3 * len(SIZES)


def test_what_did_not_change_is_not_copied_again(
    cuda: ImitationCUDA, parts: dict[str, list[Tensor]], residency: Residency
) -> None:
    residency.only()
    first = cuda.copied_to_host
    residency.only(PARAMETERS)
    residency.only()
    assert cuda.copied_to_host == first
    residency.only(PARAMETERS)
    residency.changed()
    residency.only()
    residency.on(*PARTS)
    assert cuda.copied_to_host == first + size_of(*parts[PARAMETERS])


def test_a_write_that_autograd_sees_need_not_be_told(
    cuda: ImitationCUDA, parts: dict[str, list[Tensor]], residency: Residency
) -> None:
    residency.only()
    residency.on(PARAMETERS)
    with torch.no_grad():
        parts[PARAMETERS][1].add_(1)
    wanted = Tensors(parameter.detach().clone() for parameter in parts[PARAMETERS])
    residency.off(PARAMETERS)
    residency.on(PARAMETERS)
    assert same(parts[PARAMETERS], wanted)


def test_the_host_shows_what_has_left_and_never_what_was_forgotten(
    cuda: ImitationCUDA, parts: dict[str, list[Tensor]], residency: Residency
) -> None:
    before = copies(parts)
    residency.only()
    for part in (PARAMETERS, MAIN_PARAMETERS, ADAM):
        assert same(
            Tensors(residency.host(tensor.detach()) for tensor in parts[part]), before[part]
        )
    with pytest.raises(AssertionError, match="forgotten"):
        residency.host(parts[GRADIENTS][0])


def test_packed_weights_come_back_as_they_were_packed_without_a_copy_to_the_host(
    cuda: ImitationCUDA,
) -> None:
    matrices = [torch.randn(3, 100).bfloat16(), torch.randn(70, 64).bfloat16()]
    others = [torch.randn(5)]
    residency = Residency(
        lambda: {
            PARAMETERS: [*matrices, *others],
            **{part: [] for part in (GRADIENTS, MAIN_PARAMETERS, ADAM)},
        }
    )
    packed, _ = pack(matrices, wide=64)
    packing = cuda.copied_to_host
    residency.keep_packed(packed)
    before = Tensors(matrix.clone() for matrix in matrices)
    for _ in range(2):
        residency.only()
        assert residency.bytes()[PARAMETERS] == 0
        assert same(Tensors(residency.host(matrix) for matrix in matrices), before)
        residency.only(PARAMETERS)
        assert same(matrices, before)
        residency.changed()
    assert cuda.copied_to_host == packing + 2 * size_of(*others)


def test_what_is_borrowed_comes_with_the_borrower_and_its_lender_alone_takes_it_away(
    cuda: ImitationCUDA, parts: dict[str, list[Tensor]], residency: Residency
) -> None:
    lent, before = parts[PARAMETERS][:2], copies(parts)
    adapter = [torch.nn.Parameter(torch.randn(7))]
    own = {PARAMETERS: adapter} | {part: [] for part in PARTS if part != PARAMETERS}
    borrower = Residency(lambda: own, loan=Loan(residency, lent))
    residency.only()
    assert borrower.bytes()[PARAMETERS] == size_of(*adapter), "it counts what is another's"
    borrower.only(MAIN_PARAMETERS)
    assert residency.bytes()[PARAMETERS] == 0, "no parameters were asked for"
    copied = cuda.copied_to_host
    borrower.only(PARAMETERS)
    assert same(Tensors(lent), Tensors(before[PARAMETERS][:2]))
    assert residency.bytes()[PARAMETERS] == size_of(*lent)
    borrower.only()
    assert residency.bytes()[PARAMETERS] == size_of(*lent), "the borrower took it away"
    residency.on(*PARTS)
    residency.only(but=borrower.borrowed)
    assert residency.bytes() == dict.fromkeys(parts, 0) | {PARAMETERS: size_of(*lent)}
    residency.only()
    assert residency.bytes()[PARAMETERS] == 0
    assert cuda.copied_to_host == copied, "the host had them"


def test_what_is_brought_for_a_moment_is_away_again_afterwards(
    cuda: ImitationCUDA, parts: dict[str, list[Tensor]], residency: Residency
) -> None:
    before = copies(parts)[PARAMETERS]
    residency.only()
    residency.on_tensors(parts[PARAMETERS][:1])
    with residency.brought(parts[PARAMETERS][:2]):
        assert same(Tensors(parts[PARAMETERS][:2]), Tensors(before[:2]))
    assert residency.bytes()[PARAMETERS] == size_of(*parts[PARAMETERS][:1])


@pytest.fixture
def weights(parts: dict[str, list[Tensor]]) -> Callable[[], list[Tensor]]:
    return lambda: [parameter.detach() for parameter in parts[PARAMETERS]]


@pytest.mark.parametrize("offload", [True, False])
def test_the_reference_comes_and_goes_without_a_copy_to_the_host_where_the_policy_has_one(
    cuda: ImitationCUDA,
    parts: dict[str, list[Tensor]],
    residency: Residency,
    weights: Callable[[], list[Tensor]],
    offload: bool,
) -> None:
    reference, first = ReferenceWeights(residency, weights), copies(parts)[PARAMETERS]
    for _ in range(2):
        with torch.no_grad():
            for parameter in parts[PARAMETERS]:
                parameter.data.add_(1.0)
        residency.changed()  # an optimizer step
        policy = copies(parts)[PARAMETERS]
        if offload:
            residency.off(PARAMETERS)
            residency.on(PARAMETERS)
        before = cuda.copied_to_host
        with reference.swapped_in():
            assert same(parts[PARAMETERS], first)
            with pytest.raises(AssertionError, match="would be lost"):
                residency.only()
        assert same(parts[PARAMETERS], policy)
        assert cuda.copied_to_host - before == (0 if offload else size_of(*parts[PARAMETERS]))
        before = cuda.copied_to_host
        with reference.swapped_in():
            assert same(parts[PARAMETERS], first)
        residency.off(PARAMETERS)  # and nothing has changed since
        assert cuda.copied_to_host == before
        residency.on(PARAMETERS)
        assert same(parts[PARAMETERS], policy)


def test_an_optimizer_step_waits_for_the_copy_of_the_one_before_and_says_that_weights_changed() -> (
    None
):
    order: list[str] = []

    def named(name: str, result: Any = None) -> Any:
        return lambda *given: order.append(name) or result

    optimizer = SimpleNamespace(
        prepare_grads=lambda: False,
        get_grad_norm=lambda: 1.0,
        step_with_ready_grads=named("step"),
        zero_grad=lambda: None,
    )
    manager = SimpleNamespace(
        topology=SimpleNamespace(active=nullcontext),
        optimizer=optimizer,
        lr_scheduler=SimpleNamespace(step=lambda count: None),
        residency=SimpleNamespace(settle=named("settle"), changed=named("changed")),
        _clip=lambda norm: None,
    )
    assert MegatronModelManager.take_step(manager) == (True, 1.0)
    assert order == ["settle", "step", "changed"]


def test_the_average_takes_each_steps_weights_though_they_are_copied_while_the_next_step_runs(
    cuda: ImitationCUDA,
    parts: dict[str, list[Tensor]],
    residency: Residency,
    weights: Callable[[], list[Tensor]],
) -> None:
    average, wanted = (
        AveragedWeights(residency, weights, 0.75),
        [x.float() for x in copies(parts)[PARAMETERS]],
    )
    # as late as it may be
    average._thread = SimpleNamespace(submit=lambda work: SimpleNamespace(result=work))
    for step in range(4):
        residency.settle()  # as an optimizer step does before it writes
        for parameter in parts[PARAMETERS]:
            parameter.data.mul_(1.5).add_(step)
        residency.changed()
        average.update()
        wanted = [
            0.75 * mean + 0.25 * new.float()
            for mean, new in zip(wanted, copies(parts)[PARAMETERS], strict=True)
        ]
    for held, mean in zip(average.held, wanted, strict=True):
        torch.testing.assert_close(held, mean, rtol=1e-6, atol=1e-6)
    policy = copies(parts)[PARAMETERS]
    with average.swapped_in():
        assert same(parts[PARAMETERS], Tensors(held.bfloat16() for held in average.held))
    assert same(parts[PARAMETERS], policy)
