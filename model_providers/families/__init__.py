"""Supported architectures: one module per `model_type` of config.json, whose function `describe`
returns the ModelDescription.
"""
