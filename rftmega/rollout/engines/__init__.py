"""Engines turn prompts into completions: vllm (fast), transformers (the oracle), scripted (no
model).
"""

from rftmega.rollout.engines.base import Engine, EngineStatus
from rftmega.rollout.engines.scripted import ScriptedEngine

__all__ = ["Engine", "EngineStatus", "ScriptedEngine"]
