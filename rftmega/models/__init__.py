"""Model code: Hugging Face folders, layers, LoRA modules and kernels."""
