"""FSDPRunner runs micro-batches of sharded models; forward and backward passes are collectives."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rftmega.backends.fsdp.decoder_inputs import feed
from rftmega.backends.fsdp.manager import FSDPModelManager
from rftmega.backends.fsdp.module import Teaching
from rftmega.backends.runner.model_runner import MicroBatch, ModelRunner, refusal_to_share
from rftmega.core.types import Rows
from rftmega.data.media.model_inputs import ImageTensors, image_tensors
from rftmega.model_providers.tower import VisionTower
from rftmega.runtime.device.spans import recorder
from rftmega.runtime.parallel.watchdog import mark


class FSDPRunner(ModelRunner):
    """FSDPRunner is the ModelRunner of a model whose parameters are sharded over the processes.
    Each process computes its own rows. All processes run the same number of micro-batches, because
    gathering a layer is a collective; an empty micro-batch runs one filler token, which does not
    count.
    """

    lockstep = True  # gathering a layer is a collective

    def __init__(self, manager: FSDPModelManager, stats: Any):
        self.manager = manager
        super().__init__(manager, manager.placement, stats)

    def _slots(self, counts: Sequence[int]) -> int:
        if self.manager.unpacked is None:
            return max(sum(counts), 1)
        return max(len(counts) * max(counts, default=0), 1)

    def why_nothing_shared(self) -> str:
        if self.manager.unpacked is not None:
            return f"rows are not packed: {self.manager.unpacked}"
        return refusal_to_share(self.cfg, self.manager.where, self.manager.dtype)

    def _run(self, batches: Sequence[MicroBatch], *, forward_only: bool) -> list[Any]:
        recorder.count("ideal", len(batches))
        if self.manager.description.tower is not None:
            self.manager.read_ahead(batch.rows.images for batch in batches)
        versions = self.manager.weight_versions()
        found = []
        counted = torch.zeros((), dtype=torch.int64, device=self.manager.where)
        try:
            for number, batch in enumerate(batches, start=1):
                mark()
                if forward_only:
                    found.append(self._forward(batch))
                    continue
                last = number == len(batches)
                with self.manager.before_micro_batch(self.manager.network, last):
                    total, count, collected = self.trained(self._forward(batch), batch)
                    total.backward()
                counted += count
                found.append(collected)
        finally:
            self.manager.gather_nothing()
        self.manager.refuse_changed(versions)
        if not forward_only:
            self.manager.divide_gradients(int(self.ranks.sum_of_speakers(counted)))
            self.manager.refuse_lost_gradient()
        return found

    def _forward(self, batch: MicroBatch) -> Any:
        """Returns the statistics of all target tokens [B, T]; 0 where a row has no target."""
        rows = batch.rows
        fed = feed(
            rows.tokens,
            rows.lengths,
            packed=self.manager.unpacked is None,
            where=self.manager.where,
            images=self._images(rows),
            needed=batch.needed,
            sorted_rows=batch.sorted_rows,
        )
        teaching: Teaching | None = None
        if batch.asked is not None or batch.taught:
            taught = batch.taught_on(self.manager.where)
            teaching = Teaching(batch.asked, taught, fed.slots)
        outputs = self.manager.network(
            fed.arguments, fed.places, fed.targets, batch.temperature, teaching
        )
        grids = [fed.in_rows(output) for output in outputs]
        if batch.asked is not None:
            return self.told(dict(zip(batch.asked.names, grids, strict=True)), batch)
        if batch.taught:
            logp, entropy, divergence = grids
            return self.stats(logp, entropy, divergence=divergence)
        return self.stats(*grids)

    def _images(self, rows: Rows) -> ImageTensors | None:
        """Returns the vision encoder's inputs for the rows' images; None for a model without one.
        A micro-batch without images gets a black image, which no token refers to.
        """
        tower = self.manager.description.tower
        if not isinstance(tower, VisionTower):
            return None
        size, width = rows.tokens.shape
        load = self.manager.pixels
        fed = image_tensors(rows.images, size, width - 1, merge=tower.merge, load=load)
        if fed.pixels is not None:
            return fed
        grid = torch.tensor([[1, tower.merge, tower.merge]])
        black = torch.zeros(tower.merge**2, tower.patch_width)
        return replace(fed, pixels=black, grids=grid)
