"""Pictures and videos that callers give as files, frames or tensors, beside their prompts' tokens."""
