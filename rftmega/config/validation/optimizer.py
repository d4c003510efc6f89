"""Checks of optimizers: required packages, support by the backend, and precision of the optimizer
states.
"""

from importlib.util import find_spec

from rftmega.config.capabilities import backend_of
from rftmega.config.schema import OptimizerConfig, RunConfig

LEAST_CHANGE = 2.0**-9  # half of bfloat16's spacing: a smaller relative change is rounded away


def optimizer(config: RunConfig) -> list[str]:
    """Returns the problems of the optimizer options of policy and critic."""
    found = _options("optimizer", config.optimizer, config)
    if config.algorithm.advantage.needs_critic:
        of_critic = config.critic.optimizer
        found += _options("critic.optimizer", of_critic, config)
        if of_critic.name == "muon":
            found.append(
                "critic.optimizer.name=muon: a value head has one row, which is no matrix to Muon. Set it to adam."
            )
    return list(dict.fromkeys(found))


def _options(section: str, chosen: OptimizerConfig, config: RunConfig) -> list[str]:
    name, states = f"{section}.name={chosen.name}", f"{section}.states={chosen.states}"
    other = chosen.name != "adam"
    narrow = chosen.states != "float32"
    if not backend_of(config).optimizers:
        return [
            f"{said} needs backend=megatron. Leave it out."
            for said, given in ((name, other), (states, narrow))
            if given
        ]
    found = _muon(section, name, chosen, config) if other else []
    if narrow and find_spec("torchao") is None:
        found.append(
            f"{states} needs the package torchao, which is not installed: `pip install torchao`, or set it to float32."
        )
    for beta in ("beta1", "beta2"):
        if chosen.states == "bfloat16" and 1 - getattr(chosen, beta) < LEAST_CHANGE:
            found.append(
                f"{states} with {section}.{beta}={getattr(chosen, beta)}: a moment that shrinks by less than 1/512 a step is "
                f"rounded back to what it was, and would never shrink. Lower {section}.{beta}, or take 8bit or float32."
            )
    return found


def _muon(section: str, said: str, chosen: OptimizerConfig, config: RunConfig) -> list[str]:
    found = []
    if find_spec("emerging_optimizers") is None:
        found.append(
            f"{said} needs the package emerging_optimizers, which is not installed: build it from "
            "github.com/NVIDIA-NeMo/Emerging-Optimizers (the one of that name on PyPI is empty), or set it to adam."
        )
    if chosen.states != "float32":
        found.append(
            f"{said} has one moment, in float32: {section}.states={chosen.states} is Adam's. Leave it out."
        )
    if config.model.lora.rank:
        found.append(
            f"{said}: model.lora.rank={config.model.lora.rank} leaves no whole matrix to learn. Set it to adam."
        )
    if config.parallel.expert > 1 or config.parallel.expert_tensor > 1:
        found.append(
            f"{said}: Megatron-Core 0.16 mixes up the groups of experts that are spread over processes. Set it to adam."
        )
    return found
