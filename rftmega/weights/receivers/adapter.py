"""Loads LoRA adapters into vLLM from memory."""

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
    """Returns the LoRARequest that selects adapter `number` in vLLM, or None for the base model
    (number 0).
    """
    if not number:
        return None
    # vLLM requires a path, but does not read it while it knows the number
    return LoRARequest(f"adapter-{number}", number, "in memory")


def adapters_of(evaluated: Mapping[str, str]) -> dict[str, LoRARequest | None]:
    """Returns the LoRARequests of the policy's adapter, under the name "", and of frozen adapters
    for evaluation, by name.

    `evaluated`: PEFT folders by name; an empty folder name means the base model, whose request is
    None. vLLM reads a folder at its first request, and again after a model load, which drops all
    adapters.
    """
    found = {"": asked_for(POLICY)}
    for number, (name, folder) in enumerate(evaluated.items(), start=POLICY + 1):
        found[name] = LoRARequest(f"adapter-{number}", number, folder) if folder else None
    return found


def set_adapter(
    worker: Any, pairs: dict[str, Tensor], said: dict[str, Any], number: int = POLICY
) -> None:
    """Replaces adapter `number` in a vLLM worker, as vLLM's own loader would from PEFT files.
    `pairs`: the adapter matrices by their PEFT names; `said`: PEFT's adapter config.

    vLLM scales the B matrices in place, so `pairs` must not be shared.

    Raises EngineError for an embedding or LM-head adapter that vLLM's model has no module for: vLLM
    would silently drop the adapter.
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
    """AdapterWorker extends the vLLM worker of a server with adapter loading
    (`--worker-extension-cls`).
    """

    def take_adapter(self, payload: bytes, version: int) -> str:
        """Replaces an adapter by the one in `payload`, the serialised adapter of push `version`.
        Each tensor-parallel worker gets the whole adapter, and vLLM shards it.

        Returns the reason if the adapter was refused, else "". The method does not raise: if
        several workers raise, vLLM takes the second error for the reply to its next call.
        """
        try:
            number, pairs, said = opened(payload, version)
            set_adapter(self, pairs, said, number)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""
