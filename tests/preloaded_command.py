"""Import what `train_rl.py` and its ranks need, once, in the server that `warm_command.py` forks
commands from.
"""

import warnings

import torch

torch.set_num_threads(1)  # a pool of threads would not survive a fork; each command sets its own

with warnings.catch_warnings():  # filters of a program that only imports are its own
    import matplotlib.figure  # noqa: F401  # of the learning curve
    import pytest  # noqa: F401  # of the bodies of tests

    import rftmega.run.preloaded

    # isort: split
    import rftmega.backends.fsdp.backend
    import rftmega.backends.megatron
    import rftmega.rollout.engines.scripted
    import rftmega.rollout.engines.transformers
    import rftmega.rollout.engines.vllm  # noqa: F401
    import tests.tiny_models  # noqa: F401

# isort: split
import rftmega.runtime.parallel.frozen_imports  # noqa: E402, F401
