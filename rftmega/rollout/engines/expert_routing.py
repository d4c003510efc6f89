"""Captures the experts that vLLM's MoE routers choose for each token, on platforms where vLLM does
not report them. The trainer replays these routes.

vLLM reports routes (`enable_return_routed_experts`) only in its second model runner, which needs
CUDA or Triton. On a CPU, a hook on each router records the routes. The tokens of an engine step are
ordered by request. Tokens found in the prefix cache were routed when the cache was filled, so
routes are also stored by KV-cache slot.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.layer import MoERunner

from rftmega.core import expert_routes
from rftmega.core.errors import EngineError
from rftmega.core.expert_routes import RoutedModel


class CapturedRoutes:
    """CapturedRoutes holds, in one process of an engine, the experts that each MoE layer chose for
    the tokens of the running requests.
    """

    def __init__(self, model: Any, runner: Any, routed: RoutedModel, row_tokens: int):
        """Hooks the routers of vLLM's module `model`, and the steps of `runner`, vLLM's first model
        runner. `routed`: the numbers of MoE layers and experts; `row_tokens`: most tokens of a
        request, prompt and completion together.
        """
        self._runner, self._shape = runner, (len(routed.layers), routed.active)
        self._row_tokens = row_tokens
        self._kind = expert_routes.kind_of(routed.experts)
        self._unknown = expert_routes.unknown(self._kind)
        self._step: dict[int, Tensor] = {}  # layer -> [tokens of the step, experts a token]
        self._by_request: dict[str, Tensor] = {}  # [row_tokens, layers, experts a token]
        self._by_slot = self._nothing(0)
        places = {layer: place for place, layer in enumerate(routed.layers)}
        for module in model.modules():
            if isinstance(module, MoERunner):
                module.router.set_capture_fn(self._noting(places[module.layer_id]))
        execute = runner.execute_model

        def watched(scheduled: Any, *given: Any, **named: Any) -> Any:
            self._step.clear()
            found = execute(scheduled, *given, **named)
            self._sort(scheduled.num_scheduled_tokens)
            return found

        runner.execute_model = watched

    def _noting(self, place: int) -> Callable[[Tensor], None]:
        def note(chosen: Tensor) -> None:
            self._step[place] = chosen.to("cpu", self._kind)

        return note

    def take(self, request: str, fed: int) -> Tensor:
        """Removes and returns the expert routes of a finished or aborted request, [fed, layers,
        experts per token]. `request`: vLLM's id of the request; `fed`: number of its tokens that
        the model processed.

        Raises EngineError if the routes were not captured.
        """
        found = self._by_request.pop(request, self._nothing(fed))[:fed].clone()
        if fed and bool((found[-1] == self._unknown).any()):
            raise EngineError(f"The engine noted no routes of a request of {fed} tokens.")
        return found

    def forget(self) -> None:
        """Drops all captured routes, since they belong to earlier weights or abandoned requests."""
        self._by_request.clear()
        self._by_slot = self._nothing(0)

    def _sort(self, tokens: dict[str, int]) -> None:
        """Assigns the routes recorded in an engine step to the step's requests. `tokens`: number of
        tokens that the step computed, by vLLM's request id.
        """
        if not self._step:
            return
        batch = self._runner.input_batch
        chosen = torch.stack([self._step[place] for place in range(self._shape[0])], dim=1)
        begin = 0
        for number, request in enumerate(batch.req_ids):
            count = tokens.get(request, 0)
            start = int(batch.num_computed_tokens_cpu[number])
            slots = self._slots(number, start + count)
            self._make_room(slots)
            known = self._by_request.get(request)
            if known is None:
                known = self._by_request[request] = self._nothing(self._row_tokens)
                known[:start] = self._by_slot[slots[:start]]
            own = chosen[begin : begin + count]
            known[start : start + count] = self._by_slot[slots[start:]] = own
            begin += count

    def _slots(self, number: int, length: int) -> Tensor:
        """Returns the KV-cache slots, as indices, of the first `length` tokens of the request with
        index `number` in vLLM's current batch.
        """
        table = self._runner.input_batch.block_table[0]
        positions = torch.arange(length)
        blocks = torch.from_numpy(table.get_numpy_array()[number].copy()).long()
        return (
            blocks[positions // table.block_size] * table.block_size + positions % table.block_size
        )

    def _make_room(self, slots: Tensor) -> None:
        size = int(slots.max()) + 1 if len(slots) else 0
        if len(self._by_slot) < size:
            more = self._nothing(2 * size - len(self._by_slot))
            self._by_slot = torch.cat([self._by_slot, more])

    def _nothing(self, tokens: int) -> Tensor:
        return torch.full((tokens, *self._shape), self._unknown, dtype=self._kind)
