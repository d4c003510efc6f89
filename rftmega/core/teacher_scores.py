"""TeacherScores: a teacher's log-probs and hidden states of the tokens that a batch trains on."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rftmega.core.ragged import Ragged

Spec = tuple[torch.dtype, tuple[int, ...]]
Vocabulary = Literal["full", "top_k", "sampled"]


class TeacherRequest(NamedTuple):
    """TeacherRequest says which numbers a teacher returns for each token.

    Every request includes the log-prob of the token itself; `sampled` requests nothing else. `full`
    adds the last hidden state, from which the teacher's LM head gives all log-probs. `top_k` adds
    the `k` likeliest tokens, their log-probs, and the log-prob of all other tokens together.
    """

    vocabulary: Vocabulary
    k: int = 0

    @property
    def names(self) -> list[str]:
        """Returns the names of the requested columns."""
        return list(self.columns(0, torch.float32))

    def columns(self, hidden: int, dtype: torch.dtype) -> dict[str, Spec]:
        """Returns the requested columns: name -> (dtype, shape of a token's element). `hidden`: the
        teacher's hidden size; `dtype`: the dtype of the teacher's forward pass.
        """
        found: dict[str, Spec] = {"logp": (torch.float32, ())}
        if self.vocabulary == "full":
            found["hidden"] = (dtype, (hidden,))
        if self.vocabulary == "top_k":
            found["buckets"] = (torch.float32, (self.k + 1,))
            found["ids"] = (torch.int32, (self.k,))
        return found


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """TeacherScores holds a teacher's numbers for a batch of rows; each column has one element per
    *taught* token, a token of the mask in a row that the teacher teaches. Other rows have no
    elements.
    """

    taught: Tensor  # [B] bool
    logp: Ragged | None = None  # of the sampled token
    ids: Ragged | None = None  # [K] int32: the likeliest tokens, likeliest first
    # [K + 1] float32: log-probs of `ids`, and last of all other tokens together
    buckets: Ragged | None = None
    hidden: Ragged | None = None  # [H] the last hidden state

    def __len__(self) -> int:
        return len(self.taught)

    def columns(self) -> dict[str, Ragged]:
        """Returns the columns that the teacher was asked for, by name."""
        named = {each.name: getattr(self, each.name) for each in fields(self)[1:]}
        return {name: column for name, column in named.items() if column is not None}

    def select(self, index: Tensor) -> "TeacherScores":
        """Returns the scores of the rows at `index` (int64 [b]); copies nothing."""
        columns = {name: column.select(index) for name, column in self.columns().items()}
        return TeacherScores(self.taught[index], **columns)

    def index_of(self, mask: Tensor) -> Tensor:
        """Returns [B * T + 1] int64: for each place of the flattened `mask` [B, T], which marks the
        trained tokens, the number of its token among the taught ones, and -1 elsewhere. The last
        element, -1, is for filler.
        """
        marks = (mask & self.taught[:, None].to(mask.device)).flatten()
        numbers = torch.where(marks, marks.cumsum(0) - 1, -1)
        return torch.cat([numbers, numbers.new_full((1,), -1)])

    @staticmethod
    def join(parts: "Iterable[TeacherScores]") -> "TeacherScores":
        """Joins the rows of all parts, in their order."""
        parts = list(parts)
        names = parts[0].columns()
        columns = {name: Ragged.join([part.columns()[name] for part in parts]) for name in names}
        return TeacherScores(torch.cat([part.taught for part in parts]), **columns)


def joined_scores(parts: Sequence[tuple[TeacherScores, ...]]) -> tuple[TeacherScores, ...]:
    """Joins the scores of each teacher over parts of a batch."""
    return tuple(map(TeacherScores.join, zip(*parts, strict=True)))
