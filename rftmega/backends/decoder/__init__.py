"""Descriptions, parameter positions and tensor-parallel plans of transformers decoders."""
