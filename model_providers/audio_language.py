"""Audio-language models: a Megatron decoder with transformers' audio encoder on its first pipeline
stage.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from rftmega.model_providers.description import ModelDescription
from rftmega.model_providers.tower import AudioTower
from rftmega.model_providers.tower_model import TowerModel


class AudioEncoder(nn.Module):
    """AudioEncoder is transformers' audio encoder and projection, which map waveform frames to
    features of the decoder's hidden size.
    """

    def __init__(self, model: ModelDescription, dtype: torch.dtype):
        """Builds the encoder with uninitialised weights."""
        from transformers.initialization import no_init_weights
        from transformers.models.qwen2_audio import modeling_qwen2_audio as source
        from transformers.models.qwen2_audio.configuration_qwen2_audio import (
            Qwen2AudioEncoderConfig,
        )

        super().__init__()
        assert isinstance(model.tower, AudioTower)
        config = Qwen2AudioEncoderConfig(**model.tower.fields)
        both: Any = SimpleNamespace(
            audio_config=config, text_config=SimpleNamespace(hidden_size=model.hidden)
        )
        with no_init_weights():  # initialising takes minutes; a checkpoint has the weights
            self.audio_tower = source.Qwen2AudioEncoder._from_config(config, dtype=dtype)
        self.multi_modal_projector = source.Qwen2AudioMultiModalProjector(both).to(dtype)

    def requires_grad_(self, requires_grad: bool = True) -> "AudioEncoder":
        """Sets whether the encoder is trained; its sinusoidal position embeddings are always
        frozen.
        """
        super().requires_grad_(requires_grad)
        self.audio_tower.embed_positions.requires_grad_(False)
        return self

    def gradient_checkpointing_enable(self, settings: dict[str, Any]) -> None:
        self.audio_tower.gradient_checkpointing_enable(settings)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        """Returns features [I, P / 2, H] of I waveforms. `frames` [I, M, 2 P]: log-mel frames with
        M mel bins, padded to the encoder's window; `lengths` [I]: number of valid frames of each
        waveform. Padding is masked out of attention; H is the decoder's hidden size.
        """
        positions = frames.shape[-1] // 2
        heard = torch.arange(positions, device=frames.device) < (lengths[:, None] - 1) // 2 + 1
        mask = torch.zeros(heard.shape, dtype=frames.dtype, device=frames.device)
        mask = mask.masked_fill(~heard, float("-inf"))[:, None, None]
        mask = mask.expand(-1, -1, positions, -1)
        encoded = self.audio_tower(frames, attention_mask=mask).last_hidden_state
        features: Tensor = self.multi_modal_projector(encoded)
        return features


class AudioLanguageModel(TowerModel):
    """AudioLanguageModel is one pipeline chunk of an audio-language model; the first chunk contains
    the audio encoder as `audio`.
    """

    place = "audio"

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: Any,
        features: Tensor | None = None,
        frames: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Any:
        """Runs the chunk over packed tokens [1, N].

        The first chunk takes `frames` and `lengths` (see AudioEncoder.forward; None if the
        micro-batch has no waveform) and `features` [N]: the 1-based index of the encoder output
        that replaces the token's embedding, 0 for text tokens.
        """
        if not self.pre_process:
            return super().forward(
                input_ids, position_ids, attention_mask, packed_seq_params=packed_seq_params
            )
        embedded = self.embedding(input_ids=input_ids, position_ids=None)  # [N, 1, H]
        if frames is not None:
            assert features is not None
            assert lengths is not None
            with torch.no_grad() if self.frozen else nullcontext():
                heard = self.audio(frames.to(self.config.params_dtype), lengths)
            rows = heard.flatten(0, 1)[(features - 1).clamp(min=0), None]
            here = (features > 0)[:, None, None]
            embedded = torch.where(here, rows.to(embedded.dtype), embedded)
        elif not self.frozen and torch.is_grad_enabled():
            embedded = embedded + self._nothing().to(embedded.dtype)
        return super().forward(
            input_ids,
            position_ids,
            attention_mask,
            decoder_input=self._scattered(embedded),
            packed_seq_params=packed_seq_params,
        )
