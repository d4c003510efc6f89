"""Counts model FLOPs: the floating-point operations that the model's definition requires, without
gradient checkpointing and padding.
A multiplication and an addition are two operations. Only matrix products are counted: of each token
with every weight that it uses (of experts, the active ones), of queries with keys, and of attention
with values, over the full square of a row, as in PaLM (arXiv:2204.02311, appendix B: 2 N + 4 L H Q
T per token in the forward pass); of a token with the states of gated delta nets. The backward pass
takes twice as many as the forward pass.
"""

from collections.abc import Callable, Iterable

from rftmega.backends.decoder.describe import TransformersModel
from rftmega.core.media_positions import PlacedImage, RowImages
from rftmega.model_providers.description import ModelDescription
from rftmega.model_providers.tower import AudioTower, VisionTower

BACKWARD = 2  # times the forward pass: gradients of the inputs and of the weights
OF_FROZEN = 1  # the same if the weights are frozen, and adapters are trained


def forward_flops(
    model: ModelDescription,
    rows: Iterable[int],
    *,
    value_head: bool = False,
    predicted: int | None = None,
) -> int:
    """Returns the FLOPs of one forward pass over all rows (token sequences); `rows` lists the
    number of tokens of each row.

    `value_head`: the model computes one value per token instead of logits. `predicted`: number of
    tokens for which the head is computed; None: all.
    """
    rows = list(rows)
    tokens = sum(rows)
    head = model.hidden * (1 if value_head else model.vocabulary)
    heads = head * (tokens if predicted is None else predicted)
    return 2 * (layer_weights(model) * tokens + heads) + sum(_attention(model, n) for n in rows)


def layer_weights(model: ModelDescription) -> int:
    """Returns the number of weights in the layers' matrices with which a token is multiplied.
    Excludes norms, biases, embedding and LM head; of experts, only the active ones count.
    """
    if isinstance(model, TransformersModel):
        return model.matrices
    sparse = len(model.experts.layers) if model.experts else 0
    mlps = (model.layers - sparse) * model.mlp_matrices * model.hidden * model.ffn
    if experts := model.experts:
        active = (
            3 * experts.active * experts.ffn
            + 3 * experts.shared_ffn
            + (1 if experts.shared_gate else 0)
        )
        mlps += sparse * model.hidden * (active + experts.number)  # the router sees every expert
    attention = model.attention_layers * _projections(model)
    if net := model.delta_net:
        convolution = net.convolved * (2 * net.key_width + net.value_width)
        projections = model.hidden * (net.projected + net.value_width)
        attention += len(net.layers) * (projections + convolution)
    return attention + mlps


def _projections(model: ModelDescription) -> int:
    """Returns the number of weights in one layer's query, key, value and output projections."""
    if latent := model.latent:
        query = model.heads * (latent.plain_dim + latent.rope_dim)
        rank = latent.query_rank
        queries = model.hidden * query if rank is None else rank * (model.hidden + query)
        down = model.hidden * (latent.key_value_rank + latent.rope_dim)
        up = latent.key_value_rank * model.heads * (latent.plain_dim + latent.value_dim)
        return queries + down + up + model.heads * latent.value_dim * model.hidden
    gates = model.heads if model.output_gate else 0
    return model.hidden * model.head_dim * (2 * model.heads + 2 * model.groups + gates)


def _attention(model: ModelDescription, tokens: int) -> int:
    """Returns the FLOPs, for one row of `tokens` tokens in all layers, of the attention scores and
    of their products with the values.

    A sliding window limits the number of tokens that a token attends to. A gated delta net computes
    three products of a token with each value head's state instead.
    """
    windowed = len(model.windowed)
    full = model.attention_layers - windowed
    seen = full * tokens + windowed * min(tokens, model.window or tokens)
    return _pair_flops(model) * tokens * seen + _delta_flops(model) * tokens


def _pair_flops(model: ModelDescription) -> int:
    """Returns the FLOPs of one layer's attention for one pair of a query and a key."""
    latent = model.latent
    width = latent.plain_dim + latent.rope_dim + latent.value_dim if latent else 2 * model.head_dim
    return 2 * model.heads * width


def _delta_flops(model: ModelDescription) -> int:
    """Returns the FLOPs of one token in the states of all gated delta nets."""
    net = model.delta_net
    if net is None:
        return 0
    return 2 * 3 * net.value_heads * net.key_dim * net.value_dim * len(net.layers)


def row_cost(model: ModelDescription) -> Callable[[int], float]:
    """Returns a function from the number of tokens of a row to its cost in the layers, for balancing
    work: its FLOPs over those of one token without attention.

    Unlike `forward_flops`, it counts only the pairs of tokens that a causal mask leaves, as
    attention kernels compute no others. So the cost of tokens behind a beginning of m tokens is
    that of the whole row minus that of m tokens.
    """
    token = 2 * layer_weights(model) + _delta_flops(model)
    pair = _pair_flops(model) / token
    windowed = len(model.windowed)
    full = model.attention_layers - windowed
    window = model.window

    def cost(tokens: int) -> float:
        pairs = tokens * (tokens + 1) / 2
        outside = max(tokens - window, 0) if window else 0
        return tokens + pair * (full * pairs + windowed * (pairs - outside * (outside + 1) / 2))

    return cost


def head_cost(model: ModelDescription) -> float:
    """Returns the cost of the LM head for one token, in the unit of `row_cost`."""
    token = 2 * layer_weights(model) + _delta_flops(model)
    return 2 * model.hidden * model.vocabulary / token


def media_costs(model: ModelDescription, images: RowImages) -> list[float]:
    """Returns the cost of each row's images, videos or waveforms in the vision or audio encoder, in
    the unit of `row_cost`.
    """
    tower = model.tower
    assert tower is not None, "a model without a tower has no images"
    token = 2 * layer_weights(model) + _delta_flops(model)
    if isinstance(tower, AudioTower):
        each = audio_flops(tower, model.hidden) / token
        return [each * len(row) for row in images.rows]
    return [
        tower_flops(tower, [media.grid for media in row]) / token
        for row in images.only(PlacedImage)
    ]


def tower_flops(tower: VisionTower, grids: Iterable[tuple[int, int, int]]) -> int:
    """Returns the FLOPs of one forward pass of the vision encoder over images; `grids` lists (time,
    height, width) of each image in patches.
    Attention is windowed except in `full_layers`; windows at the edge count with their actual
    number of patches.
    """
    block = 4 * tower.width**2 + (3 if tower.gated else 2) * tower.width * tower.ffn
    merged = tower.width * tower.merge**2
    out = tower.fields.get("out_hidden_size", tower.fields["hidden_size"])
    mergers = (1 + tower.deepstack) * (merged * merged + merged * out)
    total = 0
    for time, height, width in grids:
        patches = time * height * width
        features = patches // tower.merge**2
        total += 2 * patches * (tower.depth * block + tower.width * tower.patch_width)
        total += 2 * features * mergers
        windowed = (tower.depth - tower.full_layers) * _windowed(tower, height, width)
        seen = tower.full_layers * (height * width) ** 2 + windowed
        total += 4 * tower.width * time * seen
    return total


def _windowed(tower: VisionTower, height: int, width: int) -> int:
    """Returns the number of (query, key) pairs of patches within the attention windows of one image
    of `height` x `width` patches.
    """
    if not tower.window:
        return (height * width) ** 2
    side = tower.window // tower.patch_size
    rows = [min(side, height - first) for first in range(0, height, side)]
    columns = [min(side, width - first) for first in range(0, width, side)]
    return sum((row * column) ** 2 for row in rows for column in columns)


def audio_flops(tower: AudioTower, hidden: int) -> int:
    """Returns the FLOPs of one forward pass of the audio encoder over one waveform, which is padded
    to all positions; `hidden` is the decoder's hidden size.
    """
    width, positions = tower.width, tower.positions
    block = 2 * positions * (4 * width**2 + 2 * width * tower.ffn) + 4 * positions**2 * width
    convolutions = 2 * positions * 3 * width * (2 * tower.channels + width)
    return tower.depth * block + convolutions + positions * width * hidden
