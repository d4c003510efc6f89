"""Registers what vLLM's processes load of this project (the entry point `vllm.general_plugins` in
setup.py).
"""


def register() -> None:
    """Makes our transport known under the name that `--weight-transfer-config` gives."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # vLLM may load its plugins more than once
    if "shared_memory" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            "shared_memory", "rftmega.rollout.shared_memory", "SharedMemoryWeightTransferEngine"
        )
