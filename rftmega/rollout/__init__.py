"""Generates completions: inference engines, the pool that schedules requests to them, and remote
servers.
"""
