"""Counts of drafted and accepted tokens in speculative decoding."""

from collections.abc import Sequence

from rftmega.core.types import Metrics


class DraftCounts:
    """DraftCounts counts drafts by the position of their tokens: how many drafts had a token there,
    and of how many this token was accepted.
    """

    def __init__(self) -> None:
        self._drafted: list[int] = []
        self._accepted: list[int] = []

    def add(self, drafted: int, accepted: int) -> None:
        """Adds a draft of `drafted` tokens, of which the first `accepted` ones were accepted."""
        missing = drafted - len(self._drafted)
        self._drafted += [0] * missing
        self._accepted += [0] * missing
        for position in range(drafted):
            self._drafted[position] += 1
            self._accepted[position] += position < accepted

    def take(self, positions: int) -> list[int]:
        """Returns the numbers of drafts at each of the first `positions` positions, then the numbers
        of accepted tokens there; and begins to count anew.
        """
        found = [
            counts[position] if position < len(counts) else 0
            for counts in (self._drafted, self._accepted)
            for position in range(positions)
        ]
        self._drafted, self._accepted = [], []
        return found


def acceptance_metrics(counts: Sequence[float]) -> Metrics:
    """Returns metrics of counts as `DraftCounts.take` returns them, maybe summed over engines:
    drafted tokens, the share of them that was accepted, and this share by position (a token is
    rejected if one before it was). Shares of nothing are left out.
    """
    half = len(counts) // 2
    drafted, accepted = counts[:half], counts[half:]
    found = {"speculative_drafted_tokens": float(sum(drafted))}
    if sum(drafted):
        found["speculative_acceptance"] = sum(accepted) / sum(drafted)
    for position, (all_drafts, right) in enumerate(zip(drafted, accepted, strict=True), start=1):
        if all_drafts:
            found[f"speculative_acceptance_{position}"] = right / all_drafts
    return found
