"""Critic: a value model with the call interface of LightRFT's critics."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rftmega.core.types import Metrics, Rows
from rftmega.data.media.image_processor import ImageProcessor
from rftmega.lightrft.actor import rows_of_call
from rftmega.lightrft.image_inputs import Patches
from rftmega.lightrft.padded_experience import per_action, with_patches
from rftmega.run.placement.colocated import ColocatedValues


class Critic:
    """Critic computes the values of responses with a value model, which is its attribute
    `module`.
    """

    def __init__(
        self,
        model: ColocatedValues | Any,
        *,
        packing_samples: bool = False,
        processor: ImageProcessor | None = None,
    ):
        """`model`: the critic that a strategy has built (LightRFTStrategy.critic).
        `packing_samples`: `forward` takes sequences that are packed into one row, with
        `packed_seq_lens`. `processor`: the strategy's image processor.
        """
        self.module = model
        self.packing_samples, self.processor = packing_samples, processor

    def values(self, rows: Rows[Any]) -> Any:
        return self.module.values(rows)

    def step(self, *given: Any, **settings: Any) -> Metrics:
        found: Metrics = self.module.step(*given, **settings)
        return found

    def __call__(self, *given: Any, **settings: Any) -> Tensor:
        return self.forward(*given, **settings)

    def forward(
        self,
        sequences: Tensor,
        num_actions: int | Sequence[int] | Tensor | None = None,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        packed_seq_lens: Sequence[int] | Tensor | None = None,
    ) -> Tensor:
        """Returns the values of the states in which the response tokens are chosen, [B, A], 0 after
        the end of a response; if packed, [1, number of all response tokens].

        The arguments, and when the result has a gradient for `strategy.backward`, are as in
        `ActorVL.forward`.
        """
        rows = rows_of_call(
            sequences, num_actions, attention_mask, packed_seq_lens, packed=self.packing_samples
        )
        patches = Patches(pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw)
        rows = with_patches(rows, patches, self.processor)
        found = per_action(self._values(rows), rows)
        return found[per_action(rows.mask, rows)][None] if self.packing_samples else found

    def _values(self, rows: Rows) -> Tensor:
        """Returns the value of each target [B, T], with gradient if torch records gradients and the
        model has no pipeline stages.
        """
        module = self.module
        records = torch.is_grad_enabled() and isinstance(module, ColocatedValues)
        if records and not module.model.why_no_backward:
            found: Tensor = module.forward(rows).value
            return found
        scored: Tensor = module.values(rows)
        return scored
