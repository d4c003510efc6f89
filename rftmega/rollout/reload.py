"""What vLLM's own reload leaves undone."""

from typing import Any

from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead


def pack_output_heads(model: Any) -> None:
    """Tied to the embedding, an output head gets no weights of its own in a reload, and on a CPU it multiplies with a packed
    copy that would stay the old one. So vLLM's hook for "after loading" is called once more.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
