"""Engines turn prompts into completions: vllm (fast), transformers (the oracle), scripted (no
model).
"""

from rftmega.rollout.base import Engine, EngineStatus
from rftmega.rollout.scripted import ScriptedEngine

__all__ = ["Engine", "EngineStatus", "ScriptedEngine"]
