"""Determines this process's rank along every parallel dimension; the only module that reads
megatron.core.parallel_state.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import rftmega.runtime.device.before_megatron  # noqa: F401

# isort: split
import torch.distributed as dist
from megatron.core import parallel_state as state
from megatron.core import tensor_parallel
from torch import Tensor

from rftmega.config import ParallelConfig
from rftmega.runtime import device
from rftmega.runtime.parallel.layout import replicas
from rftmega.runtime.parallel.seeds import as_bytes, as_text


@dataclass(frozen=True, slots=True)
class Topology:
    """Topology holds parallel sizes and ranks, and the process groups that rftmega uses.

    Megatron keeps its groups in module globals, one layout per process. A Topology holds a copy of
    these globals, so that models of different layouts (an actor and a critic) exist in the same
    processes and are active in turn: see `active`.
    """

    tensor: int
    tensor_rank: int
    pipeline: int
    pipeline_rank: int
    context: int
    context_rank: int
    data: int  # rows are split over these; context-parallel processes share them
    data_rank: int
    expert: int
    expert_rank: int
    expert_tensor: int
    expert_tensor_rank: int
    tensor_group: Any
    expert_tensor_group: Any
    context_group: Any
    replica_group: Any  # the fewest processes that together hold every parameter
    _globals: dict[str, Any] = field(repr=False, compare=False)
    _streams: "RandomStreams" = field(repr=False, compare=False)

    @classmethod
    def create(cls, parallel: ParallelConfig, *, seed: int) -> "Topology":
        """Builds Megatron's process groups for the layout `parallel`, seeds its random generators
        and makes the layout active.

        Must be called after torch.distributed is initialised, in the same order on every process.
        """
        _set_globals(_NOTHING)
        state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline
            if parallel.virtual_pipeline > 1
            else None,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=parallel.expert_tensor,
            create_gloo_process_groups=False,
        )
        # Processes with different tokens draw differently; those that share a layer's tokens draw
        # alike where they must.
        different = (
            state.get_pipeline_model_parallel_rank(),
            state.get_data_parallel_rank(with_context_parallel=True),
        )
        tensor_parallel.model_parallel_cuda_manual_seed(
            seed + 100_003 * different[0] + 10_007 * different[1]
        )
        groups = [dist.new_group(ranks) for ranks in replicas(dist.get_world_size(), parallel)]
        (mine,) = (group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER)
        return cls(
            tensor=state.get_tensor_model_parallel_world_size(),
            tensor_rank=state.get_tensor_model_parallel_rank(),
            pipeline=state.get_pipeline_model_parallel_world_size(),
            pipeline_rank=state.get_pipeline_model_parallel_rank(),
            context=state.get_context_parallel_world_size(),
            context_rank=state.get_context_parallel_rank(),
            data=state.get_data_parallel_world_size(),
            data_rank=state.get_data_parallel_rank(),
            expert=state.get_expert_model_parallel_world_size(),
            expert_rank=state.get_expert_model_parallel_rank(),
            expert_tensor=state.get_expert_tensor_parallel_world_size(),
            expert_tensor_rank=state.get_expert_tensor_parallel_rank(),
            tensor_group=state.get_tensor_model_parallel_group(),
            expert_tensor_group=state.get_expert_tensor_parallel_group(),
            context_group=state.get_context_parallel_group(),
            replica_group=mine,
            _globals=_get_globals(),
            _streams=RandomStreams.now(),
        )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Makes this layout Megatron's active one within a `with` block, and restores the previous
        layout afterwards.
        """
        before = _get_globals()
        if before == self._globals:
            yield
            return
        streams = RandomStreams.now()
        _set_globals(self._globals)
        self._streams.resume()
        try:
            yield
        finally:
            self._streams.remember()
            _set_globals(before)
            streams.resume()

    def random_state(self) -> dict[str, Any]:
        """Returns the states of this layout's random generators, in a JSON-compatible form."""
        with self.active():
            streams = RandomStreams.now()
        return {
            "device": as_text(streams.device),
            "named": {name: as_text(state) for name, state in streams.named.items()},
        }

    def set_random_state(self, state: dict[str, Any]) -> None:
        """Restores the states that `random_state` returned."""
        named = {name: as_bytes(text) for name, text in state["named"].items()}
        with self.active():
            RandomStreams(as_bytes(state["device"]), named).resume()

    @staticmethod
    def destroy() -> None:
        """Destroys the process groups of Megatron's active layout, so that another layout can be
        built in the same processes.
        """
        state.destroy_model_parallel()

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline - 1

    @property
    def is_main(self) -> bool:
        return dist.get_rank() == 0

    @property
    def speaks(self) -> bool:
        """Returns whether this process reports results for its data-parallel rank: it is on the
        last pipeline stage, with tensor and context rank 0.

        The other processes of that data-parallel rank have no results, or the same ones.
        """
        return self.is_last_stage and self.tensor_rank == 0 and self.context_rank == 0

    def sum_of_speakers(self, x: Tensor) -> Tensor:
        """Sums x in place over the processes that report results (`speaks`); every process gets the
        total.

        Every process must call it, with a tensor of the same shape; the content on processes that
        report no results is ignored.
        """
        if not self.speaks:
            x.zero_()
        dist.all_reduce(x)
        return x


@dataclass(slots=True)
class RandomStreams:
    """RandomStreams stores the states of a layout's random generators: the device's default one and
    Megatron's named ones.
    """

    device: Tensor
    named: dict[str, Any]

    @classmethod
    def now(cls) -> "RandomStreams":
        return cls(
            device.current().random_state(), tensor_parallel.get_cuda_rng_tracker().get_states()
        )

    def remember(self) -> None:
        """Replaces the stored states by the generators' current states."""
        self.device, self.named = (
            device.current().random_state(),
            tensor_parallel.get_cuda_rng_tracker().get_states(),
        )

    def resume(self) -> None:
        """Sets the generators to the stored states."""
        device.current().set_random_state(self.device)
        tensor_parallel.get_cuda_rng_tracker().set_states(self.named)


def tensor_and_context() -> tuple[Any, Any]:
    """Returns the active layout's tensor-parallel and context-parallel groups."""
    return state.get_tensor_model_parallel_group(), state.get_context_parallel_group()


def _get_globals() -> dict[str, Any]:
    return {
        name: value for name, value in vars(state).items() if name[0] == "_" and name[1:2].isupper()
    }


def _set_globals(values: dict[str, Any]) -> None:
    vars(state).update(values)


_NOTHING = _get_globals()
