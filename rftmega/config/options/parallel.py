"""Options of a model's parallel layout."""

from dataclasses import dataclass
from typing import Literal

from rftmega.config.options.bounds import Count, NotNegativeInt


@dataclass
class ParallelConfig:
    tensor: Count = 1
    """Tensor-parallel size (TP): processes that share each layer's matrices. With backend=fsdp they
    are split by the model's plan in transformers.
    """

    pipeline: Count = 1
    """Pipeline-parallel size (PP): stages that share the layers."""

    sequence: bool = False
    """Sequence parallelism (SP): split the activations of tensor-parallel processes along the
    sequence.
    """

    virtual_pipeline: Count = 1
    """Virtual pipeline size (VPP): chunks of layers per stage; above 1 the schedule is interleaved.
    """

    first_stage_layers: NotNegativeInt = 0
    """Number of layers in the first pipeline stage; 0: as many as in the other stages. The middle
    stages share the remaining layers evenly.
    """

    last_stage_layers: NotNegativeInt = 0
    """Number of layers in the last pipeline stage, which also holds the LM head; 0: as many as in
    the other stages.
    """

    context: Count = 1
    """Context-parallel size (CP): processes that share the tokens of each sequence, for long
    sequences.
    """

    expert: Count = 1
    """Expert-parallel size (EP): processes that share the experts of an MoE layer; they are taken
    from the data-parallel ones.
    """

    expert_tensor: Count = 1
    """Tensor-parallel size of experts (ETP): processes that share each expert's matrices."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Gradient checkpointing (activation recomputation): none, selective (of attention; Megatron
    only) or full (of each layer).
    """

    replicas: Count = 1
    """Replicas of the model, each sharded over an equal share of the processes (HSDP); backend=fsdp
    only.
    """

    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward pass and gather them again for the backward
    pass (ZeRO-3); false keeps them in between (ZeRO-2). backend=fsdp only.
    """

    cpu_offload: bool = False
    """Keep weights, gradients and optimizer states in host memory, and copy a layer's weights to
    the device when it is computed; backend=fsdp only.
    """
