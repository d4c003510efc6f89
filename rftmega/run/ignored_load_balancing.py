"""Logs that a run does not compute the load-balancing loss of a MoE that config.json may
configure.
"""

import logging

from rftmega.config import RunConfig
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.runtime.parallel.process_group import World

log = logging.getLogger(__name__)
FIELDS = ("router_aux_loss_coef", "aux_loss_alpha", "router_z_loss_coef")


def tell_balancing(world: World, config: RunConfig) -> None:
    """Logs, on the main process, which load-balancing coefficients of config.json the run
    ignores.
    """
    if not world.is_main:
        return
    for field, value in asked_for(config.model.path).items():
        log.info(
            "model.path: config.json says %s=%s; this run trains with 0. No backend computes a load-balancing loss, and no "
            "option adds one (docs/moe.md)",
            field,
            value,
        )


def asked_for(folder: str) -> dict[str, float]:
    """Returns field -> value for the load-balancing coefficients in config.json that are not zero.
    `folder`: the model's Hugging Face folder.
    """
    fields = read_hf_config(folder)
    inner = fields.get("text_config")
    both = {**fields, **(inner if isinstance(inner, dict) else {})}
    return {field: both[field] for field in FIELDS if both.get(field)}
