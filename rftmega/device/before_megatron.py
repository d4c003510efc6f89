"""Import this before megatron.core: on a CPU it installs the view of torch that Megatron needs, and on
CUDA products of float32 stay in float32.
"""

import logging
import os

from rftmega.device import torch_view

# Transformer Engine has cuBLAS multiply float32 as TF32, whose 10 bits are too few for what such a
# run is compared with; torch itself does not. bfloat16 is as quick as ever.
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
# transformers imports torchao where it is installed. Of its kernels nothing is used here, and each
# rank would say which ones can't be loaded, and that two enumerations were told twice.
os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
for name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(name).setLevel(logging.ERROR)
torch_view.install()
