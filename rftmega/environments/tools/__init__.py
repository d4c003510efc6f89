"""Toolsets are the tools that a model may call in a rollout."""
