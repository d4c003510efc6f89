"""Generates completions: inference engines, the pool that schedules requests, remote servers."""
