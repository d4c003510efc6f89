"""Converts requests with audio to vLLM prompts."""

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from rftmega.core.errors import EngineError
from rftmega.core.media_positions import unexpanded
from rftmega.data.media.audio_processor import AudioProcessor
from rftmega.rollout.requests import Request

SAMPLE = 5000  # samples of the waveform compared at the start


class WaveformPrompts:
    """WaveformPrompts decodes the waveforms of requests; vLLM's own processor then computes their
    feature frames.
    """

    def __init__(self, processor: AudioProcessor):
        self.processor = processor
        self._decoded = lru_cache(maxsize=16)(
            processor.waveform
        )  # samples of one group are requested together

    def prompt_of(self, request: Request) -> dict[str, Any]:
        """Returns the request as a vLLM prompt: token ids with one placeholder per waveform, which
        vLLM's processor expands, and the decoded waveforms. Their digests serve as vLLM's cache
        keys, so that a waveform shared by a group of requests is processed once.

        Raises EngineError for a waveform that is given only as feature frames.
        """
        if not request.images:
            return {"prompt_token_ids": list(request.token_ids)}
        waveforms = []
        for waveform in request.images:
            if isinstance(waveform.source, torch.Tensor):
                raise EngineError(
                    "vLLM reads waveforms, and a prompt has one as frames. Give the file, or its bytes."
                )
            waveforms.append(self._decoded(waveform.source, waveform.digest))
        return {
            "prompt_token_ids": unexpanded(request.token_ids, request.images),
            "multi_modal_data": {"audio": waveforms},
            "multi_modal_uuids": {"audio": [waveform.digest for waveform in request.images]},
        }

    def check(self, engine: Any) -> None:
        """Checks that vLLM computes the same feature frames of a sample waveform as the trainer.
        Raises EngineError if not. `engine`: vLLM's LLMEngine.
        """
        from vllm.multimodal.processing import ProcessorInputs, TimingContext

        at = np.arange(SAMPLE)
        waveform = (0.3 * np.sin(0.05 * at) + (at * 7 % 251 - 125) / 500).astype(np.float32)
        own = engine.renderer.mm_processor
        items = own.info.parse_mm_data({"audio": [waveform]})
        inputs = ProcessorInputs(prompt=[self.processor.placeholder], mm_data_items=items)
        (made,) = own.apply(inputs, TimingContext(enabled=False))["mm_kwargs"]["audio"]
        theirs, ours = made["input_features"].data, self.processor.frames_in(waveform)
        length = int(made["feature_attention_mask"].data.sum())
        if not torch.equal(theirs, ours) or length != self.processor.frames_of(SAMPLE):
            raise EngineError(
                "vLLM makes other frames of a waveform than the trainer: the feature extractors of the two differ. Is another "
                "version of transformers installed than requirements/ has?"
            )
