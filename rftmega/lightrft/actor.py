"""PolicyActor: a policy with the call interface of LightRFT's actors."""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from rftmega.core.interfaces import Policy
from rftmega.core.types import Metrics, Rows, TokenStats
from rftmega.lightrft.padded_experience import Samples, per_action, rows_of_canvas
from rftmega.run.placement.colocated import ColocatedPolicy

Processor = TypeVar("Processor")
# LightRFT's keyword -> what determines it in rftmega
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


class PolicyActor(Generic[Processor]):
    """PolicyActor computes log-probs of responses with a policy, which is its attribute `module`."""

    def __init__(
        self,
        pretrain_or_model: Policy | Any,
        *,
        packing_samples: bool = False,
        processor: Processor | None = None,
        **settings: Any,
    ):
        """`pretrain_or_model`: the policy that a strategy has built (LightRFTStrategy.policy).
        `packing_samples`: `forward` takes sequences that are packed into one row, with
        `packed_seq_lens`. `processor`: the strategy's processor of images or waveforms.

        Raises ValueError for a path, and for `settings`, which LightRFT passes here and rftmega
        reads elsewhere.
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
        """Raises NotImplementedError, since the engine generates completions, not the actor."""
        raise NotImplementedError(
            f"{type(self).__name__}.generate: an engine answers. Call gather_and_generate of the strategy."
        )

    def __call__(self, *given: Any, **settings: Any) -> Any:
        found: Any = self.forward(*given, **settings)  # type: ignore[attr-defined]
        return found

    def _forward_result(self, rows: Rows, return_output: bool) -> Any:
        """Returns the result of `forward` for rows that contain their images and waveforms:
        log-probs, and with `return_output` also the TokenStats. They have a gradient if torch
        records gradients and the model has no pipeline stages.
        """
        module, stats = self.module, None
        if torch.is_grad_enabled() and isinstance(module, ColocatedPolicy):
            stats = None if module.actor.why_no_backward else module.forward(rows)
        stats = self.log_probs(rows) if stats is None else stats
        found = per_action(stats.logp, rows)
        if self.packing_samples:
            found = found[per_action(rows.mask, rows)][None]
        return (found, stats) if return_output else found


def rows_of_call(
    sequences: Tensor,
    num_actions: int | Sequence[int] | Tensor | None,
    attention_mask: Tensor | None,
    packed_seq_lens: Sequence[int] | Tensor | None,
    *,
    packed: bool,
) -> Rows:
    """Returns the sequences that a model's `forward` gets as Rows, token sequences that start at
    column 0; the arguments are those of `forward`. `packed`: the sequences are packed into one row.
    """
    if num_actions is None:
        raise ValueError(
            "num_actions=None asks for logits, which stay where they are computed. Give the number of the response's columns."
        )
    if packed:
        if packed_seq_lens is None:
            raise ValueError("packing_samples needs packed_seq_lens. Give each row's length.")
        return _packed(sequences, num_actions, packed_seq_lens).rows()
    mask = torch.ones_like(sequences) if attention_mask is None else attention_mask
    return rows_of_canvas(sequences, mask, int(num_actions))  # type: ignore[arg-type]


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
