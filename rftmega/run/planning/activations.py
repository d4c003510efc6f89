"""Predicts the activation memory of one process, after Korthikanti et al. 2022 (arXiv:2205.05198,
section 4).

The paper counts the layer of GPT; this module counts in the same way a layer with RMS norms, a
gated MLP that keeps its intermediate results, grouped or latent attention that stores no score
matrix, experts, and no dropout. Routing is assumed to be balanced.

Legend: n tokens of a micro-batch on this process, t tensor-parallel processes, s the share of a
token-wise activation that one of these processes keeps: 1 / t with sequence parallelism, else 1.
"""

from dataclasses import dataclass

from rftmega.config import ParallelConfig
from rftmega.model_providers.description import DeltaNet, ModelDescription, stage_layers
from rftmega.run.planning.models import PlannedModel

RULE_CHUNK = 64  # tokens of a chunk of a gated delta net (models/kernels/delta_rule.py)
CHUNK = 1024  # tokens whose logits exist at once (models/kernels/linear_log_probs.py)


@dataclass(frozen=True)
class Load:
    """Load is the size and the number of the micro-batches that one process trains on."""

    tokens: int  # of a micro-batch, all context-parallel processes together
    micro_batches: int  # per optimizer step and data-parallel rank


def layer_bytes(
    model: ModelDescription, parallel: ParallelConfig, layer: int, itemsize: int
) -> float:
    """Returns the bytes per token that layer number `layer` stores for the backward pass on one
    process; `itemsize`: bytes of an activation.
    """
    s = 1 / parallel.tensor if parallel.sequence else 1.0
    # Inputs and outputs of both norms; a float32 reciprocal deviation for each norm.
    norms = itemsize * 4 * model.hidden * s + 8 * s
    net = model.delta_net
    mixed = (
        _delta_net(net, parallel.tensor, itemsize)
        if net and layer in net.layers
        else _attention(model, parallel.tensor, itemsize)
    )
    return norms + mixed + _mlp(model, parallel, layer, itemsize)


def _attention(model: ModelDescription, t: int, itemsize: int) -> float:
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
    joint = heads + 2 * groups  # the values are a part of it, so all of it stays
    rotated = heads + groups
    normed = heads + groups if model.qk_norm else 0
    normed += 2 * heads if model.output_gate else 0  # the gates, and the gated output
    # 4: a log-sum in float32
    return itemsize * model.head_dim * (joint + rotated + normed + heads) + 4 * heads


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
    s = 1 / parallel.tensor if parallel.sequence else 1.0
    # dispatched and combined
    routed = experts.active * (2 * model.hidden + 4 * experts.ffn) * itemsize * s
    router = 3 * 4 * experts.number * s
    return routed + router + itemsize * 4 * experts.shared_ffn / parallel.tensor


def _chunk_bytes(
    model: ModelDescription, parallel: ParallelConfig, stage: int, itemsize: int
) -> tuple[float, float]:
    """Returns the bytes per token that a pipeline stage stores for the backward pass, without
    gradient checkpointing: for its largest chunk of layers (with virtual pipeline stages it has
    several), and for its largest layer. `itemsize`: bytes of an activation.
    """
    sparse = model.experts.layers if model.experts else frozenset()
    linear = model.delta_net.layers if model.delta_net else frozenset()
    of_kind: dict[tuple[bool, bool], float] = {}
    for layer in range(model.layers):
        kind = layer in sparse, layer in linear
        if kind not in of_kind:
            of_kind[kind] = layer_bytes(model, parallel, layer, itemsize)
    layers = [
        [of_kind[layer in sparse, layer in linear] for layer in chunk]
        for chunk in stage_layers(model.layers, parallel)[stage]
    ]
    return max(map(sum, layers)), max(max(chunk) for chunk in layers)


def chunks_in_flight(parallel: ParallelConfig, stage: int, micro_batches: int) -> int:
    """Returns for how many pairs of layer chunk and micro-batch a stage stores activations at once,
    with the 1F1B schedule or its interleaved form (section 4.2.3 of the paper). `micro_batches`:
    number of micro-batches of an optimizer step.
    """
    p, v = parallel.pipeline, parallel.virtual_pipeline
    if v == 1:
        return min(micro_batches, p - stage)
    return min(micro_batches * v, 2 * (p - stage - 1) + (v - 1) * p + 1)


def training(planned: PlannedModel, stage: int, load: Load) -> int:
    """Returns the peak bytes of activations in an optimizer step on one process of pipeline stage
    `stage`: those stored for the micro-batches in flight, and the working memory of one layer.
    `load`: size and number of the micro-batches.
    """
    model, parallel, itemsize = planned.model, planned.parallel, planned.itemsize
    n = load.tokens / parallel.context
    s = 1 / parallel.tensor if parallel.sequence else 1.0
    chunk, layer = _chunk_bytes(model, parallel, stage, itemsize)
    working = layer  # gradients of one layer's stored activations
    if parallel.recompute == "full":
        size = max(map(len, stage_layers(model.layers, parallel)[stage]))
        chunk, working = size * itemsize * model.hidden * s, 2 * layer
    boundary = itemsize * model.hidden * s if parallel.pipeline > 1 else 0  # a chunk's output
    return int(
        n * (chunks_in_flight(parallel, stage, load.micro_batches) * (chunk + boundary) + working)
    )


def scoring(planned: PlannedModel, load: Load) -> int:
    """Returns the bytes of activations in a forward pass without gradients: the working memory of
    one layer. `load`: size and number of the micro-batches.
    """
    model, parallel, itemsize = planned.model, planned.parallel, planned.itemsize
    return int(load.tokens / parallel.context * _chunk_bytes(model, parallel, 0, itemsize)[1])


def log_probs(planned: PlannedModel, stage: int, load: Load, *, learns: bool) -> int:
    """Returns the bytes that computing log-probs of one micro-batch (its size is in `load`) takes
    on the last pipeline stage (0 on other stages, and for a value model): hidden states, logits of
    a chunk of tokens and, if the model is trained (`learns`), the gradients of both and of the
    output weight.
    """
    if planned.value or stage != planned.parallel.pipeline - 1:
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
