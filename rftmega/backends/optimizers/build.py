"""Builds Megatron's optimizers from a run's config."""

from collections.abc import Sequence
from typing import Any

from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import ParamKey, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

from rftmega.backends.optimizers.offload import inner_optimizers
from rftmega.config import OptimizerConfig

MUON_MOMENTUM = 0.95  # as Muon's author sets it, with Nesterov momentum


def build_optimizer(
    options: OptimizerConfig,
    model: Sequence[Any],
    config: TransformerConfig,
    *,
    shards: bool,
    overrides: dict[ParamKey, Any] | None,
) -> Any:
    """Builds the optimizer of a model's wrapped chunks; several Megatron optimizers are chained.
    `shards`: the states are sharded over the processes that hold the same parameters. `overrides`:
    learning rates and weight decay of certain parameters; None: Megatron's defaults.
    """
    chosen = MegatronOptimizerConfig(
        optimizer="adam",
        lr=options.learning_rate,
        min_lr=options.min_learning_rate,
        weight_decay=options.weight_decay,
        adam_beta1=options.beta1,
        adam_beta2=options.beta2,
        adam_eps=options.epsilon,
        clip_grad=options.clip_grad,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=shards,
        overlap_param_gather=options.overlap_param_gather and shards,
        muon_momentum=MUON_MOMENTUM,
        muon_use_nesterov=True,
        # orthogonalises whole matrices instead of shards, for the same result in every layout
        muon_tp_mode="duplicated",
    )
    if options.name == "muon":
        from megatron.core.optimizer.muon import get_megatron_muon_optimizer

        return get_megatron_muon_optimizer(
            chosen, list(model), config_overrides=overrides, use_gloo_process_groups=False
        )
    built = get_megatron_optimizer(
        chosen, list(model), config_overrides=overrides, use_gloo_process_groups=False
    )
    if options.states != "float32":
        from rftmega.backends.optimizers.low_precision_adam import ADAMS  # imports torchao

        for inner in inner_optimizers(built):
            if inner.optimizer is not None:  # a process without trainable parameters has none
                inner.optimizer = ADAMS[options.states](inner.optimizer.param_groups)
    return built
