"""Import this before megatron.core: on a CPU it installs the view of torch that Megatron needs, and on
CUDA products of float32 stay in float32.
"""

import os

from rftmega.runtime.device import torch_view

# Transformer Engine has cuBLAS multiply float32 as TF32, whose 10 bits are too few for what such a
# run is compared with; torch itself does not. bfloat16 is as quick as ever.
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
torch_view.install()
