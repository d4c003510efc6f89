"""Describes the models of a run for planning: architecture, layout, and whether they
are trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rftmega.backends.decoder.describe import TransformersModel
from rftmega.backends.decoder.gathered_groups import Groups, read_groups
from rftmega.config import LoRA, OptimizerConfig, ParallelConfig, RunConfig
from rftmega.config.capabilities import backend_of
from rftmega.config.options.teachers import names_of
from rftmega.config.teacher_config import config_of
from rftmega.converters import Rule, table
from rftmega.converters.adapters import AdaptedLayer, adapted_layers
from rftmega.core.errors import CheckpointError
from rftmega.model_providers.description import ModelDescription, describe
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.models.known_fields import ignore

POLICY = "policy"
BYTES = {"float32": 4, "bfloat16": 2}
PARAMETERS, GRADIENTS, MAIN_PARAMETERS, ADAM = STATES = (
    "parameters",
    "gradients",
    "main_parameters",
    "adam",
)


@dataclass(frozen=True)
class PlannedModel:
    """PlannedModel is one model of a run, with its layout."""

    model: ModelDescription
    rules: Sequence[Rule]
    parallel: ParallelConfig
    optimizer: OptimizerConfig | None  # None: it is only scored
    value: bool  # a value head instead of an LM head
    itemsize: int  # bytes of a parameter
    # every tensor-parallel rank holds all of latent attention's down-projections, as in Transformer
    # Engine
    narrow_whole: bool
    frozen_tower: bool = False  # the vision tower is not trained
    groups: Groups | None = None  # FSDP2's parameter groups; None on Megatron
    path: str = ""  # the folder with the model's config.json
    lora: LoRA = field(default_factory=LoRA)  # adapters that `groups` contain
    # the layers with adapters, on Megatron: only the adapters are trained; (): all weights are
    adapted: tuple[AdaptedLayer, ...] = ()

    def with_layout(
        self, parallel: ParallelConfig, optimizer: OptimizerConfig | None
    ) -> "PlannedModel":
        groups = self.groups
        if groups is not None and parallel.tensor != self.parallel.tensor:
            groups = self.groups_of(parallel.tensor)
        return replace(self, parallel=parallel, optimizer=optimizer, groups=groups)

    def groups_of(self, tensor: int) -> Groups:
        """Returns FSDP2's parameter groups on the first of `tensor` tensor-parallel processes.

        Raises CheckpointError if the matrices can't be sharded among `tensor` processes.
        """
        return _groups(self.path, tensor, self.lora, value=self.value)[1]


def models_of(
    config: RunConfig, *, auto: str = "bfloat16", narrow_whole: bool = True
) -> dict[str, PlannedModel]:
    """Returns the models of a run by name: policy, critic, reward_model, cost_model, and the teachers
    that the run holds.

    `auto`: the dtype that model.dtype=auto stands for; `narrow_whole`: whether every
    tensor-parallel rank holds all of latent attention's down-projections, as in Transformer Engine.

    Raises CheckpointError if a folder has no config.json, or one of an unknown architecture.
    """
    ignore(config.model.ignore_config_fields)
    itemsize = BYTES[auto if config.model.dtype == "auto" else config.model.dtype]

    def planned(
        path: str,
        parallel: ParallelConfig,
        optimizer: OptimizerConfig | None,
        *,
        value: bool,
        given: RunConfig = config,
    ) -> PlannedModel:
        lora = config.model.lora if optimizer else LoRA()
        model, rules, groups = (
            _sharded(path, parallel.tensor, lora, value=value)
            if backend_of(given).any_decoder
            else (*_of_a_family(path, value=value), None)
        )
        return PlannedModel(
            model,
            rules,
            parallel,
            optimizer,
            value,
            itemsize,
            narrow_whole,
            config.model.freeze_vision,
            groups,
            path,
            lora,
            _adapted(config, rules) if optimizer else (),
        )

    policy = config.model.path
    found = {
        POLICY: planned(
            policy, config.parallel, config.optimizer, value=config.algorithm.task == "reward_model"
        )
    }
    if config.algorithm.advantage.needs_critic:
        critic = config.critic
        found["critic"] = planned(
            critic.path or policy, critic.parallel, critic.optimizer, value=True
        )
    for name, chosen in config.reward.scoring_models().items():
        found[name] = planned(chosen.path, config.parallel, None, value=True)
    teachers = config.algorithm.teachers
    for name, teacher in zip(names_of(teachers), teachers, strict=True):
        if teacher.loads:
            own = config_of(config, teacher)
            found[name] = planned(teacher.path, teacher.parallel, None, value=False, given=own)
    return found


def _adapted(config: RunConfig, rules: Sequence[Rule]) -> tuple[AdaptedLayer, ...]:
    lora = config.model.lora
    if not lora.rank or backend_of(config).any_decoder:
        return ()
    return tuple(adapted_layers(rules, rank=lora.rank, targets=lora.targets))


def _of_a_family(path: str, *, value: bool) -> tuple[ModelDescription, Sequence[Rule]]:
    hf_config = read_hf_config(path)
    return describe(hf_config), table(hf_config, value_head=value)


def _sharded(
    path: str, tensor: int, lora: LoRA, *, value: bool
) -> tuple[ModelDescription, Sequence[Rule], Groups]:
    """Returns the description, conversion rules and FSDP2 groups of a decoder that transformers
    builds. Without a conversion table there are no rules, and the description is read from the
    model that transformers builds.

    `path`: folder with config.json; `tensor`: tensor-parallel size; `value`: with a value head
    instead of an LM head.
    """
    counted, groups = _groups(path, tensor, lora, value=value)
    try:
        return *_of_a_family(path, value=value), groups
    except CheckpointError:
        return counted, (), groups


def _groups(path: str, tensor: int, lora: LoRA, *, value: bool) -> tuple[TransformersModel, Groups]:
    targets = tuple(lora.targets)
    return read_groups(path, value=value, tensor=tensor, rank=lora.rank, targets=targets)
