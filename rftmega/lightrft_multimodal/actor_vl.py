"""ActorVL: a policy that sees, called as LightRFT's users call theirs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rftmega.data.given_pictures import Patches
from rftmega.interfaces import Policy
from rftmega.lightrft.padded_experience import Samples, per_action, rows_of_canvas, with_patches
from rftmega.media.processor import PictureProcessor
from rftmega.types import Metrics, Rows, TokenStats

# keyword there -> what decides it here
REPLACED = {
    "use_flash_attention_2": "nothing: what is installed",
    "bf16": "model.dtype of the config",
    "lora_rank": "nothing: all weights, or those that model.freeze_vision leaves, are learnt",
    "lora_alpha": "nothing, as lora_rank",
    "lora_dropout": "nothing, as lora_rank",
    "target_modules": "nothing, as lora_rank",
    "ds_config": "parallel.* of the config",
    "device_map": "parallel.* of the config",
}


class ActorVL:
    """ActorVL gives log-probs of responses to prompts with pictures and videos; `module` is the policy
    itself.
    """

    def __init__(
        self,
        pretrain_or_model: Policy | Any,
        *,
        packing_samples: bool = False,
        processor: PictureProcessor | None = None,
        **settings: Any,
    ):
        """`pretrain_or_model`: the policy that a strategy has built (LightRFTStrategy.policy).
        `packing_samples`: sequences are one row, with `packed_seq_lens`. `processor`: the
        strategy's.

        Raises ValueError for a path, and for settings of LightRFT's that something else decides
        here.
        """
        if isinstance(pretrain_or_model, str):
            raise ValueError(
                f"pretrain_or_model={pretrain_or_model!r}: a strategy builds models, from model.path of its config. Give "
                "LightRFTStrategy.policy."
            )
        for name in settings:
            why = REPLACED.get(name, "it is unknown")
            raise ValueError(f"{name}={settings[name]!r} is not read here: {why}.")
        self.module: Policy = pretrain_or_model
        self.packing_samples, self.processor = packing_samples, processor

    def log_probs(self, rows: Rows[Any], *, temperature: float | None = None) -> TokenStats[Any]:
        return self.module.log_probs(rows, temperature=temperature)

    def reference_log_probs(self, rows: Rows[Any]) -> TokenStats[Any]:
        return self.module.reference_log_probs(rows)

    def step(self, *given: Any, **settings: Any) -> Metrics:
        return self.module.step(*given, **settings)

    def generate(self, *given: Any, **settings: Any) -> Any:
        """Raises NotImplementedError: an engine answers."""
        raise NotImplementedError(
            "ActorVL.generate: an engine answers. Call gather_and_generate of the strategy."
        )

    def __call__(self, *given: Any, **settings: Any) -> Any:
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
        return_output: bool = False,
        packed_seq_lens: Sequence[int] | Tensor | None = None,
    ) -> Any:
        """Returns log-probs of the responses [B, A], 0 where one has ended; packed [1, all of them].

        Every process calls it with the whole batch; there is no gradient (a loss is learnt in
        `step`). With `return_output` (log-probs, TokenStats of all targets). A pair of frames lasts
        a second, as it does in transformers where nobody says how long. Raises ValueError where rows
        and pictures don't add up.
        """
        if num_actions is None:
            raise ValueError(
                "num_actions=None asks for logits, which stay where they are computed. Give the number of the response's columns."
            )
        if self.packing_samples:
            if packed_seq_lens is None:
                raise ValueError("packing_samples needs packed_seq_lens. Give each row's length.")
            rows = _packed(sequences, num_actions, packed_seq_lens).rows()
        else:
            mask = torch.ones_like(sequences) if attention_mask is None else attention_mask
            rows = rows_of_canvas(sequences, mask, int(num_actions))  # type: ignore[arg-type]
        patches = Patches(pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw)
        rows = with_patches(rows, patches, self.processor)
        stats = self.log_probs(rows)
        found = per_action(stats.logp, rows)
        if self.packing_samples:
            found = found[per_action(rows.mask, rows)][None]
        return (found, stats) if return_output else found


def _packed(
    sequences: Tensor, num_actions: Any, packed_seq_lens: Sequence[int] | Tensor
) -> Samples:
    actions, lengths = torch.as_tensor(num_actions), torch.as_tensor(packed_seq_lens)
    return Samples(
        sequences=sequences,
        attention_mask=torch.ones_like(sequences),
        action_mask=None,
        num_actions=actions,
        packed_seq_lens=lengths,
        response_length=actions,
        total_length=lengths,
        prompts=[],
        labels=[],
        pad_len=None,
    )
