"""Generates completions: inference engines, the pool that schedules requests, and remote servers."""
