"""Puts the policy's adapter into vLLM from memory."""

from typing import Any

from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

NUMBER = 1  # of the one adapter that an engine has
# vLLM asks for a path, and does not read it while the number is known to it
POLICY_ADAPTER = LoRARequest("policy", NUMBER, "in memory")


def set_adapter(worker: Any, pairs: dict[str, Tensor], said: dict[str, Any]) -> None:
    """Replaces the adapter in a worker of vLLM, as its own loader would from PEFT's files. `pairs` and
    `said` are what PEFT's two files hold.

    vLLM multiplies the second matrices by their scaling in place: they must be nobody else's.
    """
    lora = worker.model_runner.lora_manager
    manager = lora._adapter_manager
    helper = PEFTHelper.from_dict(said)
    helper.validate_legal(lora.lora_config)
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    made = LoRAModel.from_lora_tensors(
        NUMBER,
        pairs,
        helper,
        device=str(lora.device),
        dtype=lora.lora_config.lora_dtype,
        model_vocab_size=lora.vocab_size,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    manager.remove_adapter(NUMBER)
    manager.add_adapter(made)
    manager.activate_adapter(NUMBER)
