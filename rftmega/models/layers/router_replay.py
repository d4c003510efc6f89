"""MoE routers that replay given expert choices (routes), or record their own, in any parallel
layout.
Megatron-Core's own RouterReplay is one global list over all models, in the order in which layers
were built, whose mode is switched around each forward pass and recomputation. Here the routes of a
micro-batch are attached to its packed sequence instead, and a layer reads them when its forward
pass begins: also in a recomputation, whichever micro-batches ran in between. R3 is from Ma et al.
(arXiv:2510.11370); R2, the trainer's own routes, from Zheng et al. (arXiv:2507.18071).
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from rftmega.core import expert_routes
from rftmega.core.expert_routes import ChosenExperts

TopK = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class PackedRoutes:
    """PackedRoutes holds the given or recorded expert choices for the tokens of one micro-batch
    that this process's routers see.
    """

    given: Tensor | None  # [n, layers, experts per token] on the device; None: routers choose
    complete: bool = True  # no given route is unknown
    noted: dict[int, Tensor] = field(default_factory=dict)  # layer -> [n, experts per token]


@dataclass(frozen=True, slots=True)
class RouteInputs:
    """RouteInputs holds the given expert choices that the routers replay for a micro-batch, and the
    list `chosen` that collects the routers' own choices.
    """

    given: Tensor | None  # [B, S, layers, experts per token], on the host
    chosen: list[ChosenExperts] | None = None

    def packed(self, take: Callable[..., Tensor], slots: Tensor, own: slice) -> PackedRoutes:
        """Returns the routes of the tokens in the packed slots `own`, the range whose tokens this
        process's routers see.

        `take` is Packing.take_vectors; `slots` maps packed tokens to indices in the flat [B * S]
        grid.
        """
        if self.given is None:
            return PackedRoutes(None)
        flat = self.given.flatten(0, 1)
        unknown = expert_routes.unknown(flat.dtype)
        mine = slots[own]
        complete = bool((mine < len(flat)).all())  # slots from len(flat) on are filler
        complete = complete and not bool((flat[mine] == unknown).any())
        return PackedRoutes(take(self.given, fill=unknown)[own], complete)

    def note(self, routes: PackedRoutes, slots: Tensor, own: slice, size: int) -> None:
        """Appends the expert choices that a pipeline chunk's layers recorded in `routes` to
        `chosen`.

        `slots` maps packed tokens to indices in the flat [B * S] grid, and `own` is the range of
        those whose tokens this process's routers see; slots from `size` on are filler and are left
        out.
        """
        if self.chosen is None:
            return
        mine = slots[own]
        inside = mine < size
        for layer, experts in routes.noted.items():
            self.chosen.append(ChosenExperts(mine[inside], layer, experts.cpu()[inside]))


class LayerRoutes:
    """LayerRoutes replaces Megatron's RouterReplay in the router of one layer, and replays or
    records its expert choices.
    """

    def __init__(self, place: int):
        """Creates the replacement for the layer whose index among the model's MoE layers is
        `place`.
        """
        self.place = place
        self.routes: PackedRoutes | None = None

    def enter(self, layer: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Stores the routes of the micro-batch that the layer is about to compute, from the layer's
        argument `packed_seq_params`; a forward pre-hook.
        """
        self.routes = getattr(named["packed_seq_params"], "routes", None)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the scores and ids of the experts of each token, both [n, topk]; given routes
        replace the router's own choice where they are known.

        `scores` [n, experts]; `default_compute_topk` is Megatron's function for the router's own
        choice, which takes the other arguments.
        """
        assert default_compute_topk is not None
        routes = self.routes
        if routes is None or routes.given is None or not routes.complete:
            values, chosen = default_compute_topk(scores, topk, num_groups, group_topk)
            if routes is None:
                return values, chosen
            if routes.given is None:
                routes.noted[self.place] = chosen
                return values, chosen
            told = routes.given[:, self.place]
            known = told != expert_routes.unknown(told.dtype)
            chosen = torch.where(known, told.long(), chosen)
        else:
            chosen = routes.given[:, self.place].long()
        return scores.gather(1, chosen), chosen


def install(chunk: Any, layers: Collection[int]) -> None:
    """Makes the routers of a pipeline chunk replay or record the routes of their micro-batches.
    `layers`: indices of the model's MoE layers.
    """
    places = {layer: place for place, layer in enumerate(sorted(layers))}
    for layer in chunk.modules():
        if isinstance(layer, TransformerLayer) and hasattr(layer.mlp, "router"):
            routes = LayerRoutes(places[layer.layer_number - 1])
            layer.mlp.router.router_replay = routes
            layer.register_forward_pre_hook(routes.enter, with_kwargs=True)
