"""Puts adapters into vLLM from memory."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from rftmega.core.errors import EngineError
from rftmega.core.shards import OF_VOCABULARY
from rftmega.weights.transports.adapter_message import POLICY, opened


def asked_for(number: int) -> LoRARequest | None:
    """Returns how vLLM is asked for the adapter of a number; None for the model by itself."""
    if not number:
        return None
    # vLLM asks for a path, and does not read it while the number is known to it
    return LoRARequest(f"adapter-{number}", number, "in memory")


def adapters_of(evaluated: Mapping[str, str]) -> dict[str, LoRARequest | None]:
    """Returns how vLLM is asked for the policy's adapter, under "", and for frozen ones by their names.

    `evaluated`: their PEFT folders. vLLM reads one when it is first asked for, and again after the
    model was loaded, which drops all adapters.
    """
    found = {"": asked_for(POLICY)}
    for number, (name, folder) in enumerate(evaluated.items(), start=POLICY + 1):
        found[name] = LoRARequest(f"adapter-{number}", number, folder) if folder else None
    return found


def set_adapter(
    worker: Any, pairs: dict[str, Tensor], said: dict[str, Any], number: int = POLICY
) -> None:
    """Replaces an adapter in a worker of vLLM, as its own loader would from PEFT's files. `pairs` and
    `said` are what PEFT's two files hold.

    vLLM multiplies the second matrices by their scaling in place: they must be nobody else's.

    Raises EngineError for an embedding or a head that vLLM's model has no place beside: it would leave
    their pairs out without a word.
    """
    lora = worker.model_runner.lora_manager
    manager = lora._adapter_manager
    helper = PEFTHelper.from_dict(said)
    helper.validate_legal(lora.lora_config)
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    made = LoRAModel.from_lora_tensors(
        number,
        pairs,
        helper,
        device=str(lora.device),
        dtype=lora.lora_config.lora_dtype,
        model_vocab_size=lora.vocab_size,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    of_vocabulary = [name for name in made.loras if name.endswith(OF_VOCABULARY)]
    if unserved := [name for name in of_vocabulary if name not in manager.modules]:
        raise EngineError(
            f"vLLM serves no adapter on {', '.join(unserved)} of {type(manager.model).__name__}. Set model.lora.push=merged."
        )
    manager.remove_adapter(number)
    manager.add_adapter(made)
    manager.activate_adapter(number)


class AdapterWorker:
    """AdapterWorker is what a worker of a server can do beside vLLM's own (`--worker-extension-cls`)."""

    def take_adapter(self, payload: bytes, version: int) -> str:
        """Replaces an adapter; tensor-parallel workers get all of it, and vLLM cuts it.

        Returns why it was not taken, or "". Where several workers raise, vLLM takes the second one's
        error for its answer to the next call.
        """
        try:
            number, pairs, said = opened(payload, version)
            set_adapter(self, pairs, said, number)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""
