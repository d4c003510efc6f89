"""Moves the policy's weights from the trainer's shards into inference engines or an exported
folder, under their Hugging Face names.
"""

from rftmega.weights.adapter_weights import AdapterPairs, AdapterWeights
from rftmega.weights.export import export_hf_folder, gather_to, rehearse_hf_folder
from rftmega.weights.gather import Exporter
from rftmega.weights.push import EngineWeights

__all__ = [
    "AdapterPairs",
    "AdapterWeights",
    "EngineWeights",
    "Exporter",
    "export_hf_folder",
    "gather_to",
    "rehearse_hf_folder",
]
