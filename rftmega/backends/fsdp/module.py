"""Builds a transformers decoder without its weights, with a head that computes log-probs or values
without materialising the logits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rftmega.backends.decoder.describe import read_config
from rftmega.backends.decoder.meta_decoder import state_buffers
from rftmega.backends.decoder.parameter_places import Placed, places_of
from rftmega.backends.fsdp.exchanges import copied
from rftmega.backends.fsdp.packed_attention import ATTENTION, EDGES
from rftmega.backends.fsdp.support import refusal_to_pack
from rftmega.checkpoints.reader import is_distributed
from rftmega.core.errors import CheckpointError
from rftmega.core.teacher_scores import TeacherRequest
from rftmega.model_providers.backend_support import advice
from rftmega.model_providers.output_head import (
    OutputHead,
    decoder_of,
    names_of_head,
    output_head,
)
from rftmega.model_providers.transformers_decoders import SEEING, on_meta, refuse_bidirectional
from rftmega.models.hf.hf_folder import HFFolder
from rftmega.models.hf.quantised_folder import open_quantised
from rftmega.models.kernels.chunked_head import Head
from rftmega.models.kernels.linear_log_probs import VocabularyShard, linear_stats
from rftmega.models.kernels.teacher_terms import TaughtTokens, teacher_numbers, teacher_terms
from rftmega.models.lora.linear import LinearWithPair

VALUE_WEIGHT, VALUE_BIAS = "score.weight", "score.bias"
OTHER_HEAD = "{head} is not the embedding, though tie_word_embeddings=true"


@dataclass(frozen=True, slots=True)
class Teaching:
    """Teaching tells the head which part of distillation to compute: a student computes its
    divergence from each teacher (`taught`), a teacher computes its scores (`asked`). The class is
    not a tuple, since FSDP2 would cast the tensors of a tuple.
    """

    asked: TeacherRequest | None = None
    taught: Sequence[TaughtTokens] = ()
    slots: Tensor = field(
        default_factory=lambda: torch.empty(0)
    )  # [N] each target's place in the micro-batch's grid


class LogProbHead(nn.Module):
    """LogProbHead computes the log-probs of target tokens and the entropies, without materialising
    the logits.
    """

    def __init__(self, head: OutputHead):
        super().__init__()
        self.linear, self.before, self.after, cap = head
        # before the factor, by which the temperature is divided
        self.cap = None if cap is None else cap / self.after
        self.shard: VocabularyShard | None = None  # this process's vocabulary rows; None: all

    def forward(
        self, hidden: Tensor, targets: Tensor, temperature: float, teaching: Teaching | None = None
    ) -> tuple[Tensor, ...]:
        """Maps hidden states [N, H] and target token ids [N] to log-probs and entropies, both [N]
        float32, of the logits divided by `temperature`; with `teaching` also to the divergences
        from teachers [N, teachers], or instead to a teacher's numbers.
        """
        weight, bias = self.linear.weight, self.linear.bias
        if self.before != 1.0:
            hidden = hidden * self.before
        if self.shard is None:
            shard = VocabularyShard(0, len(weight), None)
        else:
            shard, hidden = self.shard, copied(hidden, self.shard.group)
        pair = self.linear.factors(hidden) if isinstance(self.linear, LinearWithPair) else None
        divisor = temperature / self.after
        head = Head(weight, bias, pair, self.cap)
        if teaching is not None and teaching.asked is not None:
            asked = teaching.asked
            numbers = teacher_numbers(asked, hidden, head, targets, divisor, shard)
            return tuple(numbers[name] for name in asked.names)
        logp, entropy = linear_stats(
            hidden, weight, targets, divisor, shard, bias=bias, pair=pair, cap=self.cap
        )
        if teaching is None:
            return logp, entropy
        slots = teaching.slots
        terms = teacher_terms(teaching.taught, hidden, head, logp, slots, divisor, shard)
        return logp, entropy, terms


class ValueLayer(nn.Module):
    """ValueLayer is a value head: a linear layer that computes a value per token."""

    def __init__(self, hidden: int, *, bias: bool):
        super().__init__()
        self.linear = nn.Linear(hidden, 1, bias=bias)

    def forward(
        self, hidden: Tensor, targets: Tensor, temperature: float, teaching: Teaching | None = None
    ) -> tuple[Tensor, ...]:
        """Maps hidden states [N, H] to values [N] float32; the other arguments are ignored."""
        return (self.linear(hidden)[:, 0].float(),)


class Network(nn.Module):
    """Network is a decoder with a head; its forward pass returns one or more numbers for each
    target token.
    """

    def __init__(self, decoder: nn.Module, head: LogProbHead | ValueLayer):
        super().__init__()
        self.decoder, self.head = decoder, head

    def forward(
        self,
        fed: Mapping[str, Any],
        places: Tensor,
        targets: Tensor,
        temperature: float,
        teaching: Teaching | None = None,
    ) -> tuple[Tensor, ...]:
        """Computes the head's outputs [N] for target token ids [N]; logits are divided by
        `temperature`.

        `fed`: the decoder's keyword arguments. `places` [N]: indices, in the decoder's flattened
        output, of the hidden states that predict the targets.
        """
        hidden = self.decoder(**fed, use_cache=False).last_hidden_state
        outputs: tuple[Tensor, ...] = self.head(
            hidden.flatten(0, 1)[places], targets, temperature, teaching
        )
        return outputs


class SeeingNetwork(Network):
    """SeeingNetwork is a vision-language decoder with a head.

    Its vision encoder runs in every pass of every process, with or without an image, because
    gathering its weights is a collective.
    """

    def forward(
        self,
        fed: Mapping[str, Any],
        places: Tensor,
        targets: Tensor,
        temperature: float,
        teaching: Teaching | None = None,
    ) -> tuple[Tensor, ...]:
        """Computes the head's outputs [N] for target token ids [N], as `Network.forward` does.

        `fed` also contains the images: `pixels` [P, C], `grids` [I, 3] and `features` [1, S]: the
        1-based index of the vision encoder's output that replaces the token's embedding, 0 for text
        tokens.
        """
        words: Any = self.decoder.language_model
        tower: Any = self.decoder.visual
        embedded = words.get_input_embeddings()(fed["input_ids"])
        seen = tower(fed["pixels"], grid_thw=fed["grids"])
        here = fed["features"] > 0
        rows = (fed["features"] - 1).clamp(min=0)
        embedded = torch.where(
            here[..., None], seen.pooler_output[rows].to(embedded.dtype), embedded
        )
        more: dict[str, Any] = {}
        if deep := getattr(seen, "deepstack_features", None):
            more["visual_pos_masks"] = here
            more["deepstack_visual_embeds"] = [each[rows[here]] for each in deep]
        hidden = words(
            inputs_embeds=embedded,
            position_ids=fed["position_ids"],
            use_cache=False,
            **{EDGES: fed[EDGES]},
            **more,
        ).last_hidden_state
        outputs: tuple[Tensor, ...] = self.head(
            hidden.flatten(0, 1)[places], targets, temperature, teaching
        )
        return outputs


@dataclass(frozen=True, slots=True)
class Built:
    """Built holds a network on the meta device, and the transformers model that contains the same
    modules.
    """

    network: Network
    model: PreTrainedModel
    names: dict[str, str]  # the network's parameter names -> transformers' names
    unpacked: str | None  # why rows are padded instead of packed


def meta_model(path: str) -> tuple[PreTrainedModel, str | None]:
    """Builds the transformers model of a folder's config.json on the meta device, in float32.
    Returns it and the reason why its rows must be padded, or None if they can be packed.

    Raises CheckpointError if transformers can't build the model.
    """
    config = read_config(path)
    unpacked = None
    try:
        model = on_meta(config, ATTENTION)
        unpacked = refusal_to_pack(model)
    except (ValueError, ImportError) as error:  # the model accepts only its own attention
        unpacked = str(error)
    except KeyError as error:  # it has a class for each attention, and none for ATTENTION
        unpacked = f"it has no attention {error}"
    if unpacked is not None:
        model = _with_its_own_attention(path, config)
    return model, unpacked


def with_head(
    model: PreTrainedModel, unpacked: str | None, path: str, *, value_model: bool, head_bias: bool
) -> Built:
    """Adds a head that computes log-probs to a transformers model of the folder `path`; with
    `value_model` a value head, which has a bias if `head_bias`. `unpacked`: see `meta_model`.

    Raises CheckpointError if the model can't be run correctly.
    """
    refuse_bidirectional(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if value_model:
        hidden = model.config.get_text_config().hidden_size
        with torch.device("meta"):
            head: LogProbHead | ValueLayer = ValueLayer(hidden, bias=head_bias)
        for parameter, name in zip(head.parameters(), (VALUE_WEIGHT, VALUE_BIAS), strict=False):
            names[id(parameter)] = name
    else:
        head = LogProbHead(output_head(model))
    sees = model.config.model_type in SEEING
    if sees and unpacked is not None:
        raise CheckpointError(
            f"{path}: {unpacked}, so its rows would be padded, and rows with images are packed. "
            + advice(model.config, "Take another model")
        )
    network = (SeeingNetwork if sees else Network)(decoder_of(model), head)
    own = {name: names[id(parameter)] for name, parameter in network.named_parameters()}
    return Built(network, model, own, unpacked)


def opened(path: str, hf_config: Mapping[str, Any]) -> HFFolder:
    """Opens the weights of a model folder with this config.json.

    Raises CheckpointError if they can't be read, or are a distributed checkpoint of Megatron.
    """
    if is_distributed(path):
        raise CheckpointError(
            f"{path} is a distributed checkpoint of Megatron, and backend=fsdp reads Hugging Face folders. "
            "Convert it with `rftmega convert to-hf`, or take backend=megatron."
        )
    return open_quantised(path, hf_config)


def unusable(files: HFFolder, problems: Sequence[str]) -> CheckpointError:
    """Returns the error for a folder whose weights have these problems."""
    return CheckpointError(
        f"{files.folder}: {', '.join(problems[:10])}. Nothing can be learnt from there; take an earlier export, or "
        "download the folder again."
    )


def places_in(files: HFFolder, built: Built, *, value_model: bool) -> dict[str, list[Placed]]:
    """Returns parameter or buffer name (transformers') -> positions of the folder's tensors in it,
    for everything that `files` must have of a network; a value head may be missing.

    Raises CheckpointError as `places_of` does, and for a tensor of a dtype that can't be read.
    """
    parameters = dict(built.network.named_parameters())
    wanted: dict[str, Tensor] = {name: parameters[own] for own, name in built.names.items()}
    wanted |= state_buffers(built.model)
    for name in (VALUE_WEIGHT, VALUE_BIAS):
        if name not in files:
            wanted.pop(name, None)
    weight, *others = names_of_head(built.model)
    tied = bool(getattr(built.model.config, "tie_word_embeddings", False))
    heads = [weight, *others] if value_model else [weight] if tied else []
    shapes = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    found = places_of(built.model, shapes, files, allowed=heads)
    for name, places in found.items():
        for place in places:
            files.dtype_of(place.name, integers=not wanted[name].is_floating_point())
    return found


def _with_its_own_attention(path: str, config: Any) -> PreTrainedModel:
    for attention in ("sdpa", "eager"):
        try:
            return on_meta(config, attention)
        except (ValueError, ImportError) as error:
            refused = error
    raise CheckpointError(f"{path}: transformers builds no decoder of this: {refused}")
