"""Import the packages that most tests need, once, in the server that `mutations.py` forks pytest from.

Megatron-Core is not among them: rftmega prepares torch for it, and must be imported before it.
"""

import warnings

with warnings.catch_warnings():  # filters of pytest are its own
    import hypothesis  # noqa: F401
    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen2.modeling_qwen2
    import transformers.models.qwen3.modeling_qwen3
    import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

torch.set_num_threads(1)  # a pool of threads would not survive a fork

# isort: split
import rftmega.runtime.parallel.frozen_imports  # noqa: E402, F401
