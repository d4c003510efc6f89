"""What every rank needs, imported once in the server that ranks are forked from (see `ranks.py`)."""

import warnings

warnings.filterwarnings("ignore")

import pytest  # noqa: E402, F401
import transformers.models.llama.modeling_llama  # noqa: E402
import transformers.models.qwen2.modeling_qwen2  # noqa: E402
import transformers.models.qwen3.modeling_qwen3  # noqa: E402
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: E402, F401

import rftmega.backends.fsdp.backend  # noqa: E402
import rftmega.backends.megatron  # noqa: E402
import rftmega.run.placement.reinforcement  # noqa: E402
import rftmega.run.placement.supervised  # noqa: E402
import rftmega.trainer  # noqa: E402, F401
import rftmega.weights  # noqa: E402, F401
import tests.tiny_models  # noqa: E402, F401

# isort: split
import rftmega.runtime.parallel.frozen_imports  # noqa: E402, F401
