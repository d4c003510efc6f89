"""ActorVL: a vision-language policy with the call interface of LightRFT's ActorVL."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rftmega.data.media.image_processor import ImageProcessor
from rftmega.lightrft.actor import PolicyActor, rows_of_call
from rftmega.lightrft.image_inputs import Patches
from rftmega.lightrft.padded_experience import with_patches


class ActorVL(PolicyActor[ImageProcessor]):
    """ActorVL computes log-probs of responses to prompts with images and videos, with a policy,
    which is its attribute `module`.
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
        """Returns the log-probs of the responses, [B, A], 0 after the end of a response; if packed,
        [1, number of all response tokens].

        `sequences` [B, S]: left-padded prompts and right-padded responses. `num_actions`: A, the
        number of columns of the responses; if packed, the length of each response, and
        `packed_seq_lens` is the length of each sequence. `pixel_values...` and `..._grid_thw`:
        patches and grids of the images and videos of all rows, as transformers' processor makes
        them. Under torch.no_grad() every process calls the method with the whole batch, in any
        layout. Otherwise the result has a gradient for `strategy.backward`, each process computes
        its own rows, and processes that share layers must pass the same rows. With `return_output`
        it returns (log-probs, TokenStats of all targets). In videos, two successive frames are
        assumed to last one second, the default of transformers. Raises ValueError if rows and
        images don't match.
        """
        rows = rows_of_call(
            sequences, num_actions, attention_mask, packed_seq_lens, packed=self.packing_samples
        )
        patches = Patches(pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw)
        rows = with_patches(rows, patches, self.processor)
        return self._forward_result(rows, return_output)
