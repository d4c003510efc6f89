"""Agents with their own loop, which call the policy through an OpenAI-compatible endpoint."""
