"""Registers this project's extensions in vLLM's processes: vLLM calls `register` as a plugin, by
the entry point `vllm.general_plugins` in setup.py.
"""

import os

from rftmega.runtime.parallel.orphans import server_ends_with_parent

VERIFIER = "RFTMEGA_SAMPLING_VERIFIER"  # environment variable of servers that decode speculatively
TRANSPORTS = {  # name of a weight transport -> module and class that receive
    "shared_memory": (
        "rftmega.weights.receivers.shared_memory",
        "SharedMemoryWeightTransferEngine",
    ),
    "network": ("rftmega.weights.receivers.network_transfer", "NetworkWeightTransferEngine"),
    "disk": ("rftmega.weights.receivers.disk_transfer", "DiskWeightTransferEngine"),
}


def register() -> None:
    """Registers the weight transports for vLLM's option `--weight-transfer-config`, and the media
    connector "rftmega" for the variable VLLM_MEDIA_CONNECTOR. A server ends with its trainer from now
    on. With the variable VERIFIER, drafts are verified by sampling.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    server_ends_with_parent()
    if os.environ.get(VERIFIER):
        from rftmega.rollout.engines.speculative_verification import install

        install()
    for name, (module, engine) in TRANSPORTS.items():
        # vLLM may load its plugins more than once
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, module, engine)
    from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

    from rftmega.rollout.engines.media_connector import SharedMediaConnector

    MEDIA_CONNECTOR_REGISTRY.register("rftmega")(SharedMediaConnector)
