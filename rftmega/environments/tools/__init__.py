"""Toolsets provide the tools that a model may call in a rollout."""
