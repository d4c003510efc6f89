"""ActorVL: a policy that sees, called as LightRFT's users call theirs."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rftmega.data.media.image_processor import ImageProcessor
from rftmega.lightrft.actor import PolicyActor
from rftmega.lightrft.image_inputs import Patches
from rftmega.lightrft.padded_experience import with_patches


class ActorVL(PolicyActor[ImageProcessor]):
    """ActorVL gives log-probs of responses to prompts with images and videos; `module` is the policy
    itself.
    """

    def forward(
        self,
        sequences: Tensor,
        num_actions: int | Sequence[int] | Tensor | None = None,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        return_output: bool = False,
        packed_seq_lens: Sequence[int] | Tensor | None = None,
    ) -> Any:
        """Returns log-probs of the responses [B, A], 0 where one has ended; packed [1, all of them].

        Every process calls it with the whole batch; there is no gradient (a loss is learnt in
        `step`). With `return_output` (log-probs, TokenStats of all targets). A pair of frames lasts
        a second, as it does in transformers where nobody says how long. Raises ValueError where rows
        and images don't add up.
        """
        rows = self._rows(sequences, num_actions, attention_mask, packed_seq_lens)
        patches = Patches(pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw)
        rows = with_patches(rows, patches, self.processor)
        return self._completion(rows, return_output)
