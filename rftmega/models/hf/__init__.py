"""The hf_folders room reads and writes folders of Hugging Face: their tensors, and what is told of them."""
