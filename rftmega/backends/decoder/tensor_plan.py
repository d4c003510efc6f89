"""Reads transformers' own tensor-parallel plan of a decoder.

The plan assigns styles to modules and parameters; this module computes which elements a process
holds. The embedding and LM head are not taken from the plan: their vocabulary rows are always
split, in blocks of which the last may be short.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from rftmega.backends.decoder.per_layer import numbers_in
from rftmega.converters.adapters import EMBEDDING_DOWN, EMBEDDING_UP
from rftmega.core.errors import CheckpointError
from rftmega.model_providers.backend_support import advice

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PreTrainedModel

COLUMN, ROW = "colwise", "rowwise"
COLUMN_GATHERED, ROW_OF_WHOLE = "colwise_gather_output", "rowwise_split_input"
PACKED, EXPERTS = "packed_colwise", "moe_tp_experts"
PARTIAL, VOCABULARY = "replicated_with_grad_allreduce", "vocabulary"
OF_VOCABULARY = "embedding_rowwise"
OF_LINEARS = (COLUMN, ROW, COLUMN_GATHERED, ROW_OF_WHOLE)
NUMBER = re.compile(r"\.\d+(?=\.|$)")
FUSED = 3  # dimensions of fused expert parameters


@dataclass(frozen=True, slots=True)
class Split:
    """Split lists the index ranges of one dimension of a parameter that a process holds, in order."""

    dim: int
    slices: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Returns the number of indices that a process holds along the split dimension."""
        return sum(stop - start for start, stop in self.slices)

    def of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a process's share of a parameter of the given shape."""
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])


def styles_of(model: "PreTrainedModel", size: int) -> dict[str, str]:
    """Returns module or parameter name -> tensor-parallel style, such as "colwise" or "rowwise",
    for groups of `size` processes.

    Raises CheckpointError if transformers has no plan for this model, if the plan contains a style
    that is unsupported here, or if a parameter can't be split evenly over `size` processes.
    """
    kind = type(model).__name__
    plan: dict[str, str] = model.tp_plan or {}
    found = {}
    for name, part in (*model.named_modules(), *model.named_parameters()):
        style = plan.get(NUMBER.sub(".*", name))
        if style is None:
            continue
        if not _known(style, part):
            raise CheckpointError(
                f"transformers would split {name} of {kind} by {style!r}, which this backend does not know. "
                + advice(model.config, "Set parallel.tensor=1")
            )
        found[name] = style
    vocabulary = (model.get_input_embeddings(), model.get_output_embeddings())
    words = {name for name, module in model.named_modules() if module in vocabulary}
    if found.keys() <= words:
        raise CheckpointError(
            f"transformers has no tensor-parallel plan of the layers of {kind}, so parallel.tensor={size} would split nothing "
            f"of them. {advice(model.config, 'Set it to 1')}"
        )
    _refuse_forgotten(model, found)
    found |= dict.fromkeys(words, VOCABULARY)
    _refuse_uneven(model, found, size)
    return found


def _known(style: str, part: object) -> bool:
    if isinstance(part, nn.Parameter):
        return style in (PACKED, COLUMN, ROW) and part.dim() == FUSED
    linear = isinstance(part, nn.Linear) and style in OF_LINEARS
    words = isinstance(part, nn.Embedding) and style == OF_VOCABULARY
    return linear or words or style in (PARTIAL, EXPERTS)


def _refuse_forgotten(model: "PreTrainedModel", styles: dict[str, str]) -> None:
    """Raises CheckpointError for a vector parameter, such as that of a norm, inside a module whose
    matrices are split by columns if the plan (`styles`: name -> style) does not mention the vector.

    A norm of each head would get only part of its gradient, a norm over all heads a wrong mean.
    """
    columns = {name.rpartition(".")[0] for name, style in styles.items() if style == COLUMN}
    for parent in sorted(columns):
        for name, parameter in model.get_submodule(parent).named_parameters():
            whole, module = f"{parent}.{name}", f"{parent}.{name}".rpartition(".")[0]
            if whole not in styles and module not in styles and parameter.dim() == 1:
                raise CheckpointError(
                    f"transformers' tensor-parallel plan of {type(model).__name__} says nothing of {whole}, which lies between "
                    f"matrices that it splits. {advice(model.config, 'Set parallel.tensor=1')}"
                )


def _refuse_uneven(model: "PreTrainedModel", styles: dict[str, str], size: int) -> None:
    config = model.config.get_text_config()
    whole_heads = any(name.endswith(".k_proj") and styles[name] == COLUMN for name in styles)
    for field in ("num_attention_heads", "num_key_value_heads") if whole_heads else ():
        for heads in numbers_in(config, field):
            if heads % size:
                repeated = field == "num_key_value_heads"  # by Megatron
                raise CheckpointError(
                    f"parallel.tensor={size} does not divide the {heads} heads ({field}) of the model. "
                    + (advice(model.config, "Lower it") if repeated else "Lower it.")
                )
    for name, parameter, style in _styled(model, styles):
        dim = _dimension(style, parameter.dim())
        if dim is None:
            continue
        length = parameter.shape[dim]
        parts = 2 if style == PACKED else 1
        block = -(-length // size)
        if (size - 1) * block >= length if style == VOCABULARY else length % (size * parts):
            raise CheckpointError(
                f"parallel.tensor={size} does not divide {name} {list(parameter.shape)} along dimension {dim}. Lower it."
            )


def splits_of(
    model: "PreTrainedModel", styles: dict[str, str], rank: int, size: int
) -> dict[str, Split]:
    """Returns parameter name -> Split: the index ranges of each split parameter that process `rank`
    of `size` holds; `styles` is the result of `styles_of`.
    """
    found = {}
    for name, parameter, style in _styled(model, styles):
        dim = _dimension(style, parameter.dim())
        if dim is not None:
            length = parameter.shape[dim]
            found[name] = Split(dim, tuple(_slices(style, length, rank, size)))
    return found


def partial_of(model: "PreTrainedModel", styles: dict[str, str]) -> set[str]:
    """Returns the names of replicated parameters whose gradients must be summed over the
    tensor-parallel processes, because each process applies them to its own heads only; `styles` is
    the result of `styles_of`.
    """
    return {name for name, _, style in _styled(model, styles) if style == PARTIAL}


def _styled(
    model: "PreTrainedModel", styles: dict[str, str]
) -> Iterator[tuple[str, nn.Parameter, str]]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name.endswith((EMBEDDING_DOWN, EMBEDDING_UP)):
            continue  # adapters define their own split
        style = styles.get(name, styles.get(name.rpartition(".")[0]))
        if style is not None:
            yield name, parameter, style


def _dimension(style: str, dims: int) -> int | None:
    """Returns the dimension along which a tensor-parallel style such as "colwise" splits a
    parameter of `dims` dimensions; None if every process holds the whole parameter.
    """
    if style in (COLUMN, COLUMN_GATHERED, PACKED):
        return max(dims - 2, 0)
    if style in (ROW, ROW_OF_WHOLE) and dims > 1:  # a bias is added once, after the sum
        return dims - 1
    return 0 if style == VOCABULARY else None


def _slices(style: str, length: int, rank: int, size: int) -> Iterator[tuple[int, int]]:
    parts = 2 if style == PACKED else 1  # gate and up, each of which is shared
    part = length // parts
    block = -(-part // size)
    for first in range(0, length, part):
        start = min(rank * block, part)
        yield first + start, first + min(start + block, part)
