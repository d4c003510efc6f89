"""Datasets of prompts, supervised responses and preferences, read from files in a seeded order."""
