"""Base class of the weight transfer engines in a vLLM server's worker that load complete
checkpoints.
"""

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from rftmega.core.errors import EngineError
from rftmega.runtime import device
from rftmega.weights.receivers.fp8 import quantised
from rftmega.weights.receivers.reload import (
    forget_expert_kernels,
    name_loaders,
    pack_output_heads,
    with_head_bias,
)

Init = TypeVar("Init", bound=WeightTransferInitInfo)
Update = TypeVar("Update", bound=WeightTransferUpdateInfo)


class CheckpointTransferEngine(WeightTransferEngine[Init, Update]):
    """CheckpointTransferEngine loads HF-named tensors through the model's own loader, between
    `start_weight_update` and `finish_weight_update`.

    A tensor that is missing at the end is an error; the trainer then treats the server as one
    without weights.
    """

    def expect(self, names: Iterable[str]) -> None:
        """Stores the names of all tensors that a push must bring."""
        self._expected = set(names)
        self._missing: set[str] = set()

    def start_weight_update(self) -> None:
        # an interrupted update left layers half-loaded
        finalize_layerwise_reload(self.model, self.model_config)
        forget_expert_kernels(self.model)
        name_loaders(self.model)
        initialize_layerwise_reload(self.model)
        self._missing = set(self._expected)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        pack_output_heads(self.model)

    def load(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Passes tensors to the model's loader; first quantises them to fp8 if the server runs
        quantised.
        """
        tensors = list(named_tensors)
        self._missing -= {name for name, _ in tensors}
        model: Any = self.model
        if getattr(self.model_config.hf_config, "quantization_config", None):
            device.current().prepare_fp8()
            tensors = list(quantised(tensors))
        model.load_weights(with_head_bias(model, tensors))

    def refuse_gaps(self) -> None:
        """Raises EngineError if an expected tensor was not loaded, or a layer received no weights.

        Call this method before the update ends: vLLM can't start another update after a failed one.
        """
        if self._missing:
            raise EngineError(
                f"The push ended without {sorted(self._missing)[0]} and {len(self._missing) - 1} other tensor(s)."
            )
        tied = getattr(self.model_config.hf_config, "tie_word_embeddings", False)
        for name, module in self.model.named_modules():
            info = get_layerwise_info(module)
            waits = (
                info.can_load()
                and not info.load_numel
                and any(True for _ in module.parameters(recurse=False))
            )
            # a quantised engine has parameters for KV cache scales, which no push contains
            caches = isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod)
            if waits and not caches and not (tied and isinstance(module, ParallelLMHead)):
                raise EngineError(
                    f"{name} took nothing of the push; it would keep its old weights."
                )
