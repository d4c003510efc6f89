"""RLinf's MegatronModelManager and MegatronActor, on top of rftmega's Megatron-Core backend."""

from collections.abc import Callable
from typing import Any

from rftmega.backends.megatron import actor as backend
from rftmega.backends.megatron import manager
from rftmega.config import RunConfig
from rftmega.rlinf.actor import ReinforcedActor
from rftmega.runtime.parallel.topology import Topology


class MegatronModelManager(manager.MegatronModelManager):
    """MegatronModelManager owns this process's pipeline chunks of a model, in the layout that
    parallel.* of its config describes.
    """

    def __init__(self, cfg: RunConfig) -> None:
        """Builds the model of `cfg` and loads its weights; the process group must exist."""
        super().__init__(cfg, Topology.create(cfg.parallel, seed=cfg.trainer.seed))

    def optimizer_step(self) -> tuple[float, list[float]]:
        """Clips the gradients, takes an optimizer step and advances the schedule. Returns the
        global gradient norm before clipping, NaN if it is not finite and nothing was changed, and
        the step's learning rate of each parameter group.
        """
        rates = [group["lr"] for group in self.optimizer.param_groups]
        _, grad_norm = self.take_step()
        return grad_norm, rates


class MegatronActor(MegatronModelManager, ReinforcedActor):
    """MegatronActor is a policy in 3D parallel, which the calls of ReinforcedActor train."""

    def __init__(self, cfg: RunConfig, placement: Topology, role: str = "actor") -> None:
        """Stores the arguments; `init_worker` builds the models and the engine.

        `placement`: the layout of `cfg.parallel` over the processes. `role`: "actor", or
        "reference" for a model that only scores, and has neither optimizer nor engine.
        """
        self.prepare(cfg)
        self.placement, self.role = placement, role

    def init_worker(self) -> None:
        """Builds the models and the engine; for the role "reference" only its model, whose
        `policy.log_probs` scores rows.
        """
        if self.role == "reference":
            self.build_policy()
            return
        super().init_worker()

    def build_policy(self) -> backend.MegatronActor:
        manager.MegatronModelManager.__init__(self, self.cfg, self.placement)
        self.policy = backend.MegatronActor(self.cfg, self.placement, self.role, manager=self)
        return self.policy

    def get_forward_step_func(self) -> Callable[[Any, Any], tuple[Any, Any]]:
        """Returns Megatron's `forward_step_func(data_iterator, model)` with the policy loss that
        algorithm.* describes, and moves the model with its gradients to the device. The iterator
        yields (Rows, Experience on the device).
        """
        self.strategy.phases.update()
        return self.policy.get_forward_step_func(self.learner.loss_fn)
