"""Prepares torch for megatron.core, and must be imported before it.

On a CPU it installs the view of torch that Megatron needs; on CUDA it keeps float32 matmuls in
float32 instead of TF32.
"""

import os

from rftmega.runtime.device import torch_view

# Transformer Engine makes cuBLAS multiply float32 as TF32, whose 10 bits are too few for comparing
# such runs; torch itself does not. The speed of bfloat16 is unchanged.
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
torch_view.install()
