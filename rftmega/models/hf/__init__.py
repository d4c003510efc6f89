"""Reads and writes Hugging Face folders: their tensors and metadata."""
