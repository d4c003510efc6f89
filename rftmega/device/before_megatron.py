"""Import this before megatron.core: on a CPU it installs the view of torch that Megatron needs."""

from rftmega.device import torch_view

torch_view.install()
