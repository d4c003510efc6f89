"""A stand-in for emerging_optimizers: what Megatron's Muon takes from it, written anew."""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "emerging_optimizers"
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Keller Jordan's


class OrthogonalizedOptimizer(torch.optim.Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float,
        momentum_beta: float,
        *,
        use_nesterov: bool,
        weight_decay: float,
        weight_decay_method: str,
        fp32_matmul_prec: str,
        scaled_orthogonalize_fn: Callable[..., Tensor],
    ):
        assert weight_decay_method == "decoupled"
        self.momentum, self.nesterov = momentum_beta, use_nesterov
        self.scaled_orthogonalize_fn = scaled_orthogonalize_fn
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                kept = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
                kept.lerp_(parameter.grad, 1 - self.momentum)
                given = parameter.grad.lerp(kept, self.momentum) if self.nesterov else kept
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * self.orthogonalize(parameter, given))

    def orthogonalize(self, parameter: Tensor, given: Tensor) -> Tensor:
        raise NotImplementedError


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    a, b, c = COEFFICIENTS
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


def newton_schulz_tp(
    matrix: Tensor,
    *,
    steps: int,
    coefficient_type: str,
    tp_group: Any,
    partition_dim: Any,
    mode: str,
) -> Tensor:
    if partition_dim is None or tp_group is None:
        return newton_schulz(matrix, steps)
    assert mode == "duplicated"
    parts = [torch.empty_like(matrix) for _ in range(tp_group.size())]
    dist.all_gather(parts, matrix.contiguous(), group=tp_group)
    whole = newton_schulz(torch.cat(parts, partition_dim), steps)
    return whole.chunk(len(parts), partition_dim)[tp_group.rank()]


def get_muon_scale_factor(rows: int, columns: int, *, mode: str) -> float:
    assert mode == "spectral"
    return float(max(rows, columns) ** 0.5)


def install() -> None:
    """Makes Megatron's Muon find this module."""
    root = ModuleType(NAME)
    whole = ModuleType(f"{NAME}.orthogonalized_optimizers")
    parts = ModuleType(f"{NAME}.orthogonalized_optimizers.muon_utils")
    here: Any = sys.modules[__name__]
    vars(whole).update(
        OrthogonalizedOptimizer=OrthogonalizedOptimizer, get_muon_scale_factor=get_muon_scale_factor
    )
    vars(parts).update(newton_schulz_tp=here.newton_schulz_tp)
    sys.modules |= {module.__name__: module for module in (root, whole, parts)}
    from megatron.core.optimizer import muon

    importlib.reload(muon)
