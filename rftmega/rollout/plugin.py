"""Registers what vLLM's processes load of this project (the entry point `vllm.general_plugins` in
setup.py).
"""


def register() -> None:
    """Makes our transports known: of weights under the name that `--weight-transfer-config` gives,
    of pictures under that of VLLM_MEDIA_CONNECTOR.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # vLLM may load its plugins more than once
    if "shared_memory" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            "shared_memory", "rftmega.rollout.shared_memory", "SharedMemoryWeightTransferEngine"
        )
    from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

    from rftmega.rollout.media_connector import SharedMediaConnector

    MEDIA_CONNECTOR_REGISTRY.register("rftmega")(SharedMediaConnector)
