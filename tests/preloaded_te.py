"""What every rank with Transformer Engine needs, imported once in a server of its own: the stub
before Megatron.
"""

import os

# fused activations as they are written: compiling them takes minutes
os.environ["TORCHDYNAMO_DISABLE"] = "1"

from tests import stub_te  # noqa: E402

stub_te.install()

import rftmega.model_providers.optional_cuda_packages  # noqa: E402

FOUND = rftmega.model_providers.optional_cuda_packages.Installed(
    transformer_engine=rftmega.model_providers.optional_cuda_packages.version_of(stub_te.VERSION),
    triton=True,
)
rftmega.model_providers.optional_cuda_packages.installed = lambda: FOUND  # type: ignore[assignment]

import tests.preloaded  # noqa: E402, F401
