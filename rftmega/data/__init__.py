"""Datasets of prompts, supervised responses and preferences, read from files and used in a seeded
random order.
"""
