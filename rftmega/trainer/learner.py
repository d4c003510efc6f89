"""Learner updates the policy and the critic on an experience."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rftmega.algorithms.kl import ESTIMATORS, KLController
from rftmega.core.interfaces import Host, OneProcess, Policy, ValueModel
from rftmega.core.ragged import Ragged
from rftmega.core.types import COUNT, Experience, LossFn, Metrics, TokenStats
from rftmega.trainer.journal import Journal
from rftmega.trainer.optimizer_steps import Schedule, take_steps
from rftmega.trainer.ptx import PTX


class Learner:
    """Learner updates the policy and, if there is one, the critic, which trains alone for the first
    `frozen_steps` steps; batches of `ptx` are trained on in the policy's optimizer steps.
    """

    def __init__(
        self,
        policy: Policy,
        loss_fn: LossFn,
        *,
        effective: Callable[[Experience[Ragged]], float] | None = None,
        critic: ValueModel | None = None,
        value_loss_fn: LossFn | None = None,
        frozen_steps: int = 0,
        kl: KLController | None = None,
        ptx: PTX | None = None,
        schedule: Schedule | None = None,
        journal: Journal | None = None,
        host: Host | None = None,
    ):
        """`effective` measures the effective sample size of the importance weights in `loss_fn`;
        None: the loss has no importance weights. `kl`: the KL coefficient, which adapts to the
        measured KL if it has a target. `schedule` splits a rollout batch into mini-batches; None: a
        single mini-batch. `journal`: see `take_steps`. `host`: stores the experience.
        """
        self.host = host or OneProcess()
        self.policy, self.loss_fn = policy, loss_fn
        self.effective = effective
        self.critic, self.value_loss_fn = critic, value_loss_fn
        self.frozen_steps = frozen_steps
        self.kl = kl
        self.ptx = ptx
        self.schedule, self.journal = schedule or Schedule(), journal

    def state(self) -> dict[str, Any]:
        """Returns the adaptive KL coefficient and the position in the PTX data as JSON."""
        return {
            "kl_coef": None if self.kl is None else self.kl.value,
            "ptx": None if self.ptx is None else self.ptx.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        if self.kl is not None and self.kl.target:  # otherwise it is the config's
            self.kl.value = state["kl_coef"]
        if self.ptx is not None and state["ptx"] is not None:  # PTX may start with the resumed run
            self.ptx.load_state(state["ptx"])

    def update(
        self,
        experience: Experience[Ragged],
        step: int,
        trained: Experience[Ragged],
        scored: Callable[[Experience[Ragged]], None] = lambda whole: None,
    ) -> Metrics:
        """Takes the optimizer steps of one rollout batch; `step`: number of finished training
        steps.

        Names of the critic's metrics begin with "critic_". The policy trains on `trained`, which
        may include replayed rows; the KL is measured on `experience` alone.

        If `experience` has no old log-probs, the policy's forward pass computes them, and `scored`
        is called with the completed experience before the optimizer step, which `scored` can
        prevent by raising.
        """
        metrics: Metrics = {}

        def complete(stats: TokenStats[Ragged]) -> None:
            nonlocal experience
            experience = replace(experience, old_logp=stats.logp, entropy=stats.entropy)
            scored(experience)

        if self.critic is not None:
            assert self.value_loss_fn is not None
            rows = self.schedule.mini_batches(experience.rollouts.sizes, step)
            found = take_steps(
                self.critic,
                experience,
                self.value_loss_fn,
                rows,
                journal=self.journal,
                name="critic",
            )
            metrics |= {
                name if name.startswith(COUNT) else f"critic_{name}": value
                for name, value in found.items()
            }
            metrics |= self.host.once(lambda: explained(experience))
        if step >= self.frozen_steps:
            beside: dict[str, Any] = {} if self.ptx is None else {"auxiliary": self.ptx()}
            if experience.old_logp is None:
                beside["scored"] = complete
            rows = self.schedule.mini_batches(trained.rollouts.sizes, step)
            found = take_steps(
                self.policy, trained, self.loss_fn, rows, journal=self.journal, **beside
            )
            counts = {
                name: value + metrics.get(name, 0.0)
                for name, value in found.items()
                if name.startswith(COUNT)
            }
            metrics |= found | counts
            if (effective := self.effective) is not None:
                # Over the whole rollout batch, which every process has: a ratio of sums can't be
                # averaged over micro-batches.
                weighed = experience if trained.old_logp is None else trained
                metrics["importance_effective"] = self.host.once(lambda: effective(weighed))
        if experience.reference_logp is not None:
            metrics["reference_kl"] = self.host.once(lambda: reference_kl(experience))
            if self.kl is not None:
                metrics["kl_coef"] = self.kl.value
                # the KL of a frozen policy is no signal for the coefficient
                if step >= self.frozen_steps:
                    self.kl.update(metrics["reference_kl"], len(experience))
        return metrics


def reference_kl(experience: Experience[Ragged]) -> float:
    """Returns the mean KL per token between the policy before the update and the reference,
    estimated by k3.
    """
    old, reference = experience.old_logp, experience.reference_logp
    assert old is not None and reference is not None
    mask = experience.mask.flat
    delta = old.flat[mask] - reference.flat[mask]
    return ESTIMATORS["k3"](delta).mean().item() if len(delta) else 0.0


def explained(experience: Experience[Ragged]) -> Metrics:
    """Returns the explained variance of the critic's values as a metric: 1 for a perfect fit, 0 for
    a constant value.
    """
    assert experience.old_value is not None and experience.returns is not None
    mask = experience.mask.flat
    returns = experience.returns.flat[mask].double()
    missed = (experience.returns.flat[mask] - experience.old_value.flat[mask]).double()
    if len(returns) < 2 or not returns.var():
        return {"explained_variance": 0.0}
    return {"explained_variance": (1 - missed.var() / returns.var()).item()}
