"""Supported architectures: one module per `model_type` of config.json, whose `describe` returns the
ModelDescription.
"""
