"""vLLM worker of a server with speculative decoding."""

from typing import Any

from rftmega.weights.receivers.adapter import AdapterWorker


class DraftingWorker(AdapterWorker):
    """DraftingWorker extends the vLLM worker of a server with counts of its drafts
    (`--worker-extension-cls`).
    """

    model_runner: Any

    def draft_counts(self, positions: int) -> list[int]:
        """Returns the counts since the last call; see `DraftCounts.take`."""
        counts: list[int] = self.model_runner.rejection_sampler.counts.take(positions)
        return counts
