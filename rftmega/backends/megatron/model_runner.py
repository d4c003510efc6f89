"""MegatronRunner runs micro-batches through Megatron's pipeline schedule.

With `calculate_per_token_loss`, Megatron expects a loss function to return (local sum, local
integer count, any object), and divides gradients once, by the sum of the counts of all
micro-batches and ranks.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rftmega.backends.megatron.forward import (
    HiddenProcessor,
    LogProbs,
    TeacherNumbers,
    custom_forward,
    packed_length,
    token_multiple,
    unwrap,
)
from rftmega.backends.megatron.manager import MegatronModelManager
from rftmega.backends.runner.micro_batches import fewest_micro_batches
from rftmega.backends.runner.model_runner import MicroBatch, ModelRunner, refusal_to_share
from rftmega.core import expert_routes
from rftmega.core.ragged import Ragged
from rftmega.core.types import Rows
from rftmega.data.media.model_inputs import ImageTensors, image_tensors
from rftmega.data.media.waveform_inputs import WaveformTensors, waveform_tensors
from rftmega.model_providers.tower import AudioTower
from rftmega.models.layers.router_replay import RouteInputs
from rftmega.runtime.device.spans import recorder
from rftmega.runtime.parallel.watchdog import mark


class MegatronRunner(ModelRunner):
    """MegatronRunner is the ModelRunner of Megatron models, in any parallel layout."""

    def __init__(
        self, manager: MegatronModelManager, stats: Any, processor: HiddenProcessor | None
    ):
        """Creates the runner.

        `stats`: class of the statistics per token; `processor` computes them from hidden states, or
        is None for a value model.
        """
        self.manager = manager
        super().__init__(manager, manager.topology, stats)
        self.topology = manager.topology
        self.processor = processor
        # The interleaved schedule passes micro-batches through the stages in groups, as many as
        # there are stages.
        self.multiple_of = self.topology.pipeline if len(manager.model) > 1 else 1
        self.at_least = fewest_micro_batches(self.topology.pipeline)
        # tokens of all processes meet at the experts
        self.lockstep = manager.cfg.parallel.expert > 1

    def _slots(self, counts: Sequence[int]) -> int:
        multiple = token_multiple(self.manager.config)
        return packed_length(counts, tensor_multiple=multiple, context=self.topology.context)

    def why_nothing_shared(self) -> str:
        if self.manager.topology.context > 1:
            return "parallel.context is above 1"
        if self.manager.description.delta_net is not None:
            return "layers carry a state from token to token"
        return refusal_to_share(self.cfg, self.manager.where, self.manager.dtype)

    def _run(self, batches: Sequence[MicroBatch], *, forward_only: bool) -> list[Any]:
        """Runs the micro-batches through the pipeline schedule. Returns on the last stage the
        statistics of each micro-batch or, after training, its metric sums and statistics; [] on the
        other stages.
        """
        # Narayanan et al. (arXiv:2104.04473, section 2.2): the bubble is (p - 1) / (v m) of the
        # ideal time, here as two sums.
        recorder.count("bubble", self.topology.pipeline - 1)
        recorder.count("ideal", len(batches) * len(self.manager.model))
        if self.manager.description.tower is not None:
            self.manager.read_ahead(batch.rows.images for batch in batches)
        found = self.manager.run_schedule(self.forward_step, batches, forward_only=forward_only)
        if not forward_only:
            self.manager.refuse_lost_gradient()
        return found

    def _forward(self, batch: MicroBatch) -> Any:
        if why := self.manager.why_no_backward:
            raise NotImplementedError(f"A forward pass with gradient: {why}")
        with self.topology.active():
            _, finish = self.forward_step(iter([batch]), self.manager.model[0])
            return finish(None)

    def forward_step(self, batches: Iterator[MicroBatch], model: Any) -> tuple[Any, Any]:
        """Runs the next micro-batch of `batches` through one pipeline chunk, for Megatron's
        schedule.
        Returns (output, the function that the last stage applies to the output).
        """
        mark()
        batch = next(batches)
        rows = batch.rows
        processor: HiddenProcessor | None = self.processor
        if batch.asked is not None:
            processor = TeacherNumbers(batch.asked, self.manager.description.vocabulary)
        elif batch.taught:
            taught = batch.taught_on(self.manager.where)
            processor = LogProbs(self.manager.description.vocabulary, taught)
        output = custom_forward(
            model,
            rows.tokens[:, :-1],
            # The last token of a row predicts nothing here, so it is left out.
            torch.arange(rows.tokens.shape[1] - 1) < rows.lengths[:, None] - 1,
            None,
            self.manager.config.sequence_parallel,
            value_model=processor is None,
            logits_processor=processor,
            logits_processor_args={"targets": rows.tokens[:, 1:]} if processor else None,
            temperature=batch.temperature,
            max_batch_seqlen=None,  # the plan has its own cap
            images=self._images(rows, model),
            routes=self._routes(batch),
            needed=batch.needed,
            sorted_rows=batch.sorted_rows,
        )
        finish = partial(self._stats if batch.loss_fn is None else self._loss, batch, output)
        # the schedule expects a tensor; `finish` has all of them
        shown = next(iter(output.values())) if isinstance(output, dict) else output
        return shown, finish

    def _routes(self, batch: MicroBatch) -> RouteInputs | None:
        """Returns the expert choices to replay in a micro-batch, or an empty record for the
        routers' own choices; None if neither is needed.
        """
        if batch.rows.routes is None and batch.chosen is None:
            return None
        given: Any = batch.rows.routes
        if isinstance(given, Ragged):
            width, unknown = (
                batch.rows.tokens.shape[1] - 1,
                expert_routes.unknown(given.values.dtype),
            )
            given = given.padded(width=width, fill=unknown)
        return RouteInputs(given, batch.chosen)

    def _images(self, rows: Rows, model: Any) -> ImageTensors | WaveformTensors | None:
        """Returns the inputs that the pipeline chunk `model` needs for the images or waveforms of
        the rows; None for a model without vision or audio encoder.
        """
        tower = self.manager.description.tower
        if tower is None:
            return None
        size, width = rows.tokens.shape
        feeds = unwrap(model).pre_process
        if isinstance(tower, AudioTower):
            frames = self.manager.frames if feeds else None
            return waveform_tensors(rows.images, size, width - 1, load=frames)
        load = self.manager.pixels if feeds else None
        return image_tensors(rows.images, size, width - 1, merge=tower.merge, load=load)

    def _stats(
        self, batch: MicroBatch, output: Any, shown: Any = None, non_loss_data: bool = True
    ) -> Any:
        if batch.asked is not None:
            return self.told(output, batch)
        return self.stats(output) if self.processor is None else self.stats(**output)

    def _loss(self, batch: MicroBatch, output: Any, shown: Any) -> tuple[Tensor, Tensor, Any]:
        """Returns the three results that Megatron expects of a loss function: the local loss sum
        (differentiable), the number of tokens in it (an integer tensor; 0 on all context-parallel
        ranks but one), and an object, here (the sums of the metrics, the detached statistics).

        `output`: the chunk's output. `shown`: the tensor of it that Megatron's schedule passes; not
        used.
        """
        total, count, collected = self.trained(self._stats(batch, output), batch)
        # Context-parallel processes all have the whole rows, and their gradients are summed: one of
        # them counts.
        counted = count if self.topology.context_rank == 0 else torch.zeros_like(count)
        return total, counted.int(), collected
