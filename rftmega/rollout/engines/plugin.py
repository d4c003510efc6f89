"""Registers what vLLM's processes load of this project (the entry point `vllm.general_plugins` in
setup.py).
"""

TRANSPORTS = {  # of weights -> module and class that receive them
    "shared_memory": ("shared_memory", "SharedMemoryWeightTransferEngine"),
    "network": ("network_transfer", "NetworkWeightTransferEngine"),
    "disk": ("disk_transfer", "DiskWeightTransferEngine"),
}


def register() -> None:
    """Makes our transports known: of weights under the name that `--weight-transfer-config` gives,
    of images under that of VLLM_MEDIA_CONNECTOR.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name, (module, engine) in TRANSPORTS.items():
        # vLLM may load its plugins more than once
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(
                name, f"rftmega.weights.receivers.{module}", engine
            )
    from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

    from rftmega.rollout.engines.media_connector import SharedMediaConnector

    MEDIA_CONNECTOR_REGISTRY.register("rftmega")(SharedMediaConnector)
