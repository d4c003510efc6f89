"""Predicts the activation memory of one process, after Korthikanti et al. 2022 (arXiv:2205.05198,
section 4).

The paper counts the layer of GPT; this module counts in the same way a layer with RMS norms, a
gated MLP that keeps its intermediate results, grouped or latent attention that stores no score
matrix, experts, and no dropout. Routing is assumed to be balanced.

Legend: n tokens of a micro-batch on this process, t tensor-parallel processes, s the share of a
token-wise activation that one of these processes keeps: 1 / t with sequence parallelism, else 1.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from rftmega.config import ParallelConfig
from rftmega.model_providers.description import (
    DeltaNet,
    LatentAttention,
    ModelDescription,
    stage_layers,
)
from rftmega.run.planning.models import PlannedModel

RULE_CHUNK = 64  # tokens of a chunk of a gated delta net (models/kernels/delta_rule.py)
CHUNK = 1024  # tokens whose logits exist at once (models/kernels/linear_log_probs.py)
# bytes per token of a micro-batch, of all its context-parallel processes: indices of packed tokens;
# a loss's inputs and results
PLACES, LOSS = 24, 24
# what computes a layer: Megatron with CUDA's fused kernels; Megatron with torch's own, as on a CPU
# in float32; the layers of transformers, of which FSDP2 trains
Kernels = Literal["fused", "torch", "transformers"]


@dataclass(frozen=True)
class Load:
    """Load is the size and the number of the micro-batches that one process trains on."""

    tokens: int  # of a micro-batch, all context-parallel processes together
    micro_batches: int  # per optimizer step and data-parallel rank


class LayerMemory(NamedTuple):
    """LayerMemory is the memory of one layer on one process, in bytes per token of this process."""

    stored: float  # for the backward pass
    training: float  # at most, in the backward pass, over all that the layers have stored
    scoring: float  # at most, in a forward pass without gradients


def layer_bytes(
    model: ModelDescription,
    parallel: ParallelConfig,
    layer: int,
    itemsize: int,
    kernels: Kernels = "fused",
) -> float:
    """Returns the bytes per token that layer number `layer` stores for the backward pass on one
    process; `itemsize`: bytes of an activation.
    """
    return _layer_memory(model, parallel, layer, itemsize, kernels).stored


def _layer_memory(
    model: ModelDescription, parallel: ParallelConfig, layer: int, itemsize: int, kernels: Kernels
) -> LayerMemory:
    """Returns the memory of layer number `layer`; arguments as of `layer_bytes`.

    The MLP's backward pass holds the gradients of what the MLP has stored. Then, after the MLP has
    freed its own, come the norm before it, and the attention, which holds the gradients of what it
    has stored. Under context parallelism the attention holds the keys and values of the whole rows,
    their gradients, and these once more while they are reduced; and copies of one chunk's queries,
    outputs and their gradients, about 10 times the width of the heads. This is an upper bound for
    Transformer Engine, which passes keys and values around in a ring.
    """
    hidden = itemsize * model.hidden * _share(parallel)
    net = model.delta_net
    linear = net is not None and layer in net.layers
    norms = _norms(model, parallel, itemsize, kernels)
    if net and linear:
        mixed = scored = pulled = _delta_net(net, parallel.tensor, itemsize)
    else:
        mixed = _attention(model, parallel.tensor, itemsize, kernels)
        # without a gradient, copies of torch's kernels are freed at once
        scored = pulled = _attention(
            model, parallel.tensor, itemsize, "fused" if kernels == "torch" else kernels
        )
    mlp = gradients = _mlp(model, parallel, layer, itemsize)
    if kernels == "torch" and model.gated:
        mlp += gradients / 4  # Megatron adds an offset of 0 to one half
    if parallel.context > 1 and not linear:
        keys = parallel.context * _keys_and_values(model, parallel.tensor, itemsize)
        width = itemsize * _width(model) / parallel.tensor
        # with inputs and results of the kernel, for one chunk
        if model.latent:  # padded values, and outputs
            mixed += 2 * width
        scored += 2 * keys + 2 * width
        pulled = 3 * keys + 10 * width
    after_mlp = max(
        _norm_gradient(model, parallel, itemsize, kernels) - mlp, pulled - mlp - norms / 2
    )
    return LayerMemory(
        norms + mixed + mlp,
        hidden + max(gradients, after_mlp),
        4 * hidden + max(mlp, scored),
    )


def _norms(
    model: ModelDescription, parallel: ParallelConfig, itemsize: int, kernels: Kernels
) -> float:
    """Returns the bytes per token that both norms of a layer store: inputs, outputs, and a float32
    reciprocal deviation; without fused kernels also the normalised values before the weight, and
    inputs in float32.
    """
    s = _share(parallel)
    hidden = model.hidden * s
    if kernels == "fused":
        return 4 * itemsize * hidden + 8 * s
    return 2 * (4 + 2 * itemsize) * hidden + 8 * s


def _norm_gradient(
    model: ModelDescription, parallel: ParallelConfig, itemsize: int, kernels: Kernels
) -> float:
    """Returns the bytes per token that a norm's backward pass holds at most: without a fused kernel
    five float32 numbers of each element.
    """
    each = 3 * itemsize if kernels == "fused" else 20
    return each * model.hidden * _share(parallel)


def _width(model: ModelDescription) -> float:
    """Returns the number of values per token that the kernel of context parallelism puts out, all
    heads together: it pads the values of latent attention to the size of the keys.
    """
    return model.heads * (_widest(model.latent) if model.latent else model.head_dim)


def _widest(latent: LatentAttention) -> int:
    return max(latent.plain_dim + latent.rope_dim, latent.value_dim)


def _keys_and_values(model: ModelDescription, t: int, itemsize: int) -> float:
    """Returns the bytes of a token's keys and values on one process."""
    if latent := model.latent:
        return itemsize * model.heads / t * 2 * _widest(latent)
    return itemsize * 2 * max(model.groups / t, 1) * model.head_dim


def _attention(model: ModelDescription, t: int, itemsize: int, kernels: Kernels) -> float:
    heads = model.heads / t
    if latent := model.latent:
        rank = latent.query_rank or 0
        key = latent.plain_dim + latent.rope_dim
        # before and after their norms, on every process
        narrow = 2 * rank + 2 * latent.key_value_rank + latent.rope_dim
        # Queries twice (before and after the rotation), keys, the joint keys and values that they
        # are cut from, the output.
        wide = heads * (2 * key + key + latent.plain_dim + latent.value_dim + latent.value_dim)
        return itemsize * (narrow + wide) + 4 * heads
    groups = max(model.groups / t, 1)
    # the values are a part of the joint projection, so all of it stays
    joint = groups if kernels == "transformers" else heads + 2 * groups
    rotated = heads + groups
    normed = heads + groups if model.qk_norm else 0
    stored = itemsize * model.head_dim * (joint + rotated + normed + heads)
    if model.output_gate:
        stored += itemsize * model.head_dim * 2 * heads  # the gates, and the gated output
    if kernels == "torch":  # cosines and sines; queries, cut from the joint projection
        stored += itemsize * model.head_dim * (4 + heads * model.qk_norm)
    if kernels == "transformers" and model.qk_norm:
        stored += 4 * model.head_dim * (heads + groups)  # inputs of the norms in float32
    # 4: a log-sum in float32
    return stored + 4 * heads


def _delta_net(net: DeltaNet, t: int, itemsize: int) -> float:
    """Returns the bytes per token that a gated delta net stores for the backward pass: its
    projections and convolution in the model's dtype, and the products within and between chunks in
    float32 (see `models/kernels/delta_rule.py`).
    """
    convolved = (2 * net.key_width + net.value_width) / t
    given = net.projected / t + 3 * convolved + net.value_width / t
    keys, values = net.key_heads / t, net.value_heads / t
    squares = RULE_CHUNK * (4 * values + 2 * keys)  # rows of matrices between tokens of a chunk
    states = 2 * values * net.key_dim * net.value_dim / RULE_CHUNK
    solved = values * (3 * net.key_dim + net.value_dim)
    inside = 7 * keys * net.key_dim + 7 * values * net.value_dim
    return itemsize * given + 4 * (squares + states + solved + inside)


def _mlp(model: ModelDescription, parallel: ParallelConfig, layer: int, itemsize: int) -> float:
    """Returns the bytes per token that the MLP of layer number `layer` stores for the backward
    pass: gate and up projection, the activated gate, their product; in an MoE layer, those of the
    active experts, and the routing. `itemsize`: bytes of an activation.
    """
    experts = model.experts
    if experts is None or layer not in experts.layers:
        return itemsize * (4 if model.gated else 2) * model.ffn / parallel.tensor
    s = _share(parallel)
    # dispatched and combined
    routed = experts.active * (2 * model.hidden + 4 * experts.ffn) * itemsize * s
    router = 3 * 4 * experts.number * s
    return routed + router + itemsize * 4 * experts.shared_ffn / parallel.tensor


def _kernels(planned: PlannedModel, *, cpu: bool) -> Kernels:
    if planned.groups is not None:
        return "transformers"
    return "torch" if cpu else "fused"


class StageMemory(NamedTuple):
    """StageMemory is the memory of a pipeline stage's layers, in bytes per token of one process."""

    chunk: float  # stored for the backward pass by the largest chunk of layers
    layer: LayerMemory  # the largest, in each respect
    layers: int  # of the largest chunk


def _stage_memory(planned: PlannedModel, stage: int, *, cpu: bool) -> StageMemory:
    """Returns the memory of a pipeline stage's layers without gradient checkpointing. With virtual
    pipeline stages it has several chunks of layers. `cpu`: with torch's own kernels.
    """
    kernels = _kernels(planned, cpu=cpu)
    model, parallel = planned.model, planned.parallel
    sparse = model.experts.layers if model.experts else frozenset()
    linear = model.delta_net.layers if model.delta_net else frozenset()
    of_kind: dict[tuple[bool, bool], LayerMemory] = {}
    for layer in range(model.layers):
        kind = layer in sparse, layer in linear
        if kind not in of_kind:
            of_kind[kind] = _layer_memory(model, parallel, layer, planned.itemsize, kernels)
    chunks = [
        [of_kind[layer in sparse, layer in linear] for layer in chunk]
        for chunk in stage_layers(model.layers, parallel)[stage]
    ]
    largest = LayerMemory(
        *map(max, zip(*(layer for chunk in chunks for layer in chunk), strict=True))
    )
    stored = max(sum(layer.stored for layer in chunk) for chunk in chunks)
    return StageMemory(stored, largest, max(map(len, chunks)))


def chunks_in_flight(parallel: ParallelConfig, stage: int, micro_batches: int) -> int:
    """Returns for how many pairs of layer chunk and micro-batch a stage stores activations at once,
    with the 1F1B schedule or its interleaved form (section 4.2.3 of the paper). `micro_batches`:
    number of micro-batches of an optimizer step.
    """
    p, v = parallel.pipeline, parallel.virtual_pipeline
    if v == 1:
        return min(micro_batches, p - stage)
    return min(micro_batches * v, 2 * (p - stage - 1) + (v - 1) * p + 1)


def training(planned: PlannedModel, stage: int, load: Load, *, cpu: bool = False) -> int:
    """Returns the peak bytes of activations in an optimizer step on one process of pipeline stage
    `stage`: those stored for the micro-batches in flight, and the working memory of one layer or,
    on the last stage, of the LM head if that is more. `load`: size and number of the micro-batches.
    """
    parallel = planned.parallel
    n = load.tokens / parallel.context
    hidden = planned.itemsize * planned.model.hidden * _share(parallel)
    memory = _stage_memory(planned, stage, cpu=cpu)
    stored, working = memory.chunk, memory.layer.training
    if parallel.recompute == "full":
        # each layer's input, which is a part of what the recomputed layer stores
        stored, working = memory.layers * hidden, memory.layer.stored + working - hidden
    boundary = hidden if parallel.pipeline > 1 else 0  # a chunk's output
    in_flight = chunks_in_flight(parallel, stage, load.micro_batches)
    most = max(n * working, _head(planned, stage, load, learns=True, cpu=cpu))
    kept = n * _gathered_input(planned) + load.tokens * (PLACES + LOSS)
    return int(n * in_flight * (stored + boundary) + most + kept)


def scoring(planned: PlannedModel, stage: int, load: Load, *, cpu: bool = False) -> int:
    """Returns the peak bytes of activations in a forward pass without gradients: the working memory
    of one layer or, on the last stage, of the LM head if that is more. `load`: size and number of
    the micro-batches.
    """
    layer = _stage_memory(planned, stage, cpu=cpu).layer.scoring
    n = load.tokens / planned.parallel.context
    head = _head(planned, stage, load, learns=False, cpu=cpu)
    return int(max(n * layer, head) + n * _gathered_input(planned) + load.tokens * PLACES)


def _gathered_input(planned: PlannedModel) -> float:
    """Returns the bytes per token of the buffer that Megatron keeps for the input of a matrix,
    gathered from all tensor-parallel processes under sequence parallelism.
    """
    return planned.itemsize * planned.model.hidden * planned.parallel.sequence


def _share(parallel: ParallelConfig) -> float:
    """Returns the share of a token-wise activation that one process keeps."""
    return 1 / parallel.tensor if parallel.sequence else 1.0


def _head(planned: PlannedModel, stage: int, load: Load, *, learns: bool, cpu: bool) -> float:
    """Returns the bytes that the last norm and log-probs of one micro-batch take on the last
    pipeline stage (0 on other stages); arguments as of `training`.
    """
    if stage != planned.parallel.pipeline - 1:
        return 0
    found = log_probs(planned, load, learns=learns)
    if not learns:
        return found
    model, parallel, kernels = planned.model, planned.parallel, _kernels(planned, cpu=cpu)
    n = load.tokens / parallel.context
    hidden = planned.itemsize * model.hidden * _share(parallel)
    stored = _norms(model, parallel, planned.itemsize, kernels) / 2 - hidden  # besides the output
    gradient = hidden + _norm_gradient(model, parallel, planned.itemsize, kernels)
    return n * stored + max(found, n * gradient)


def log_probs(planned: PlannedModel, load: Load, *, learns: bool) -> int:
    """Returns the bytes that computing log-probs of one micro-batch (its size is in `load`) takes
    (0 for a value model): hidden states, logits of a chunk of tokens and, if the model is trained
    (`learns`), the gradients of both and of the output weight.
    """
    if planned.value:
        return 0
    model, parallel, itemsize = planned.model, planned.parallel, planned.itemsize
    n, width = load.tokens / parallel.context, -(-model.vocabulary // parallel.tensor)
    chunk = min(n, CHUNK) * width
    half = itemsize if itemsize < 4 else 0
    if not learns:  # logits and their exponentials
        return int(n * model.hidden * itemsize + chunk * 8)
    weight = width * model.hidden * (4 + half)
    # plus the forward pass's last chunk, and the gradient in half precision
    return int(2 * n * model.hidden * itemsize + chunk * (12 + half) + weight)
