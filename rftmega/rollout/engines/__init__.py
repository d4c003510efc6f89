"""Inference engines that generate completions: vllm (fast), transformers (the reference
implementation for tests), scripted (random completions without a model).
"""

from rftmega.rollout.engines.base import Engine, EngineStatus
from rftmega.rollout.engines.scripted import ScriptedEngine

__all__ = ["Engine", "EngineStatus", "ScriptedEngine"]
