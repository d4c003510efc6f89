"""Reference engine on the transformers library, with which tests compare the other engines: it
generates one sequence and one token at a time.
"""

import logging
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from rftmega.config import RolloutConfig
from rftmega.core import expert_routes
from rftmega.core.errors import WeightMismatch
from rftmega.core.expert_routes import RoutedModel
from rftmega.core.media_positions import images_of
from rftmega.core.shards import narrowed, whole
from rftmega.core.types import Completion, Sampling
from rftmega.core.waveform_positions import PlacedWaveform
from rftmega.data.media.audio_processor import AudioProcessor, audio_processor_of
from rftmega.data.media.image_processor import ImageProcessor
from rftmega.data.media.model_inputs import image_positions
from rftmega.models.hf.converted_names import ConvertedNames
from rftmega.models.rescaled_weights import without_rescaling
from rftmega.rollout.engines.base import Engine
from rftmega.rollout.requests import Request, Requests
from rftmega.rollout.requests.distribution import log_probs_of
from rftmega.weights.receivers.fp8 import rounded

log = logging.getLogger(__name__)

CHECKED = 8  # tokens with which a model's cache is compared
# An architecture's checkpoint names of an expert's three matrices, if not gate_proj, up_proj,
# down_proj; and of the MoE block.
EXPERT_NAMES = dict.fromkeys(("mixtral", "minimax_m2"), ("w1", "w3", "w2"))
BLOCKS = dict.fromkeys(EXPERT_NAMES, ".block_sparse_moe.")
STACKED = ("gpt_oss",)  # architectures whose checkpoints hold experts as transformers does
# An architecture's checkpoint prefixes, by the prefixes in transformers.
PREFIXES = {
    family: {"model.language_model.": "model.", "model.visual.": "visual."}
    for family in ("qwen2_vl", "qwen2_5_vl")
} | {
    "qwen2_audio": {
        "model.language_model.": "language_model.model.",
        "model.audio_tower.": "audio_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "lm_head.": "language_model.lm_head.",
    }
}

# model inputs of images and of videos
KINDS_OF_MEDIA = (
    ("image", "pixel_values", "image_grid_thw"),
    ("video", "pixel_values_videos", "video_grid_thw"),
)


def named_as_in_a_folder(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns the parameters and saved buffers of `model` under the names that they have in
    safetensors checkpoints, with one tensor per expert and matrix unless these are STACKED.

    transformers holds a layer's experts in two tensors: gate_up_proj [experts, 2 x inner, hidden]
    and down_proj [experts, hidden, inner]. Views are returned, so that writing into one fills the
    model. A tied LM head appears once, as the embedding.
    """
    family = model.config.model_type
    gate, up, down = EXPERT_NAMES.get(family, ("gate_proj", "up_proj", "down_proj"))
    kept = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in kept]
    found: dict[str, Tensor] = {}
    for module_name, tensor in [*model.named_parameters(), *buffers]:
        name = module_name
        for prefix, folders in PREFIXES.get(family, {}).items():
            if name.startswith(prefix):
                name = folders + name.removeprefix(prefix)
        stem, _, kind = name.replace(".mlp.", BLOCKS.get(family, ".mlp.")).rpartition(".")
        if family in STACKED:
            found[name] = tensor
        elif kind == "gate_up_proj" and tensor.dim() == 3:
            for expert, both in enumerate(tensor.detach()):
                found[f"{stem}.{expert}.{gate}.weight"], found[f"{stem}.{expert}.{up}.weight"] = (
                    both.chunk(2)
                )
        elif kind == "down_proj" and tensor.dim() == 3:
            for expert, matrix in enumerate(tensor.detach()):
                found[f"{stem}.{expert}.{down}.weight"] = matrix
        else:
            found[f"{stem}.{kind}"] = tensor
    return found


def _close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-4)


def _is_window(layer: Any) -> bool:
    """Returns whether a layer of a cache keeps the keys of a window alone, and no other state."""
    return type(layer) is DynamicSlidingWindowLayer


def _memory(tensor: Tensor) -> int:
    """Returns the address of a tensor's storage, which is the same for tied parameters."""
    return tensor.untyped_storage().data_ptr()


class TransformersEngine(Engine):
    """TransformersEngine generates with the transformers library's own fp32 model, one token of one
    request at a time; the fast engines are tested against it.
    """

    slots = 1

    def __init__(
        self,
        folder: str | Path,
        config: RolloutConfig,
        *,
        stop_ids: Sequence[int],
        where: torch.device,
        routed: RoutedModel | None = None,
    ):
        """`folder`: Hugging Face folder of the model; its weights are not loaded, since a push
        brings them. `stop_ids`: tokens that end a completion. `where`: device of the model.
        `routed`: the MoE model whose expert routes are recorded; None: no routes are recorded.
        """
        super().__init__()
        self.longest, self.row_tokens = config.max_response_tokens, config.max_row_tokens
        self.stop_ids, self.stop = stop_ids, config.stop
        self.quantised = config.quantization == "fp8"
        self.where = where
        self.folder = folder
        self.tokenizer: Any = None
        if self.stop:
            self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        config_of = without_rescaling(AutoConfig.from_pretrained(folder, trust_remote_code=False))
        # the trainer's weights are not quantised
        vars(config_of).pop("quantization_config", None)
        sees = hasattr(config_of, "vision_config")
        kind: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        self.processor = ImageProcessor(folder) if sees else None
        self.audio_processor = audio_processor_of(folder)
        if self.audio_processor:
            kind = AutoModelForMultimodalLM
        model = kind.from_config(
            config_of, dtype=torch.float32, trust_remote_code=False, experts_implementation="eager"
        )
        self.model = model.eval().to(where)
        # by each router of the model in turn, in the current forward pass
        self._chosen: list[Tensor] = []
        self._kind = torch.uint8
        # whether a cache gives the logits of the whole sequence; None: not known yet
        self._caches: bool | None = None
        self._has_windows = False  # whether transformers' cache drops keys
        if routed is not None:
            self._kind = expert_routes.kind_of(routed.experts)
            for module in self.model.modules():
                if type(module).__name__.lower().endswith("topkrouter"):
                    module.register_forward_hook(self._note_routes)

    def _note_routes(self, router: Module, given: Any, told: tuple[Tensor, Tensor, Tensor]) -> None:
        """Forward hook of a MoE router: records the experts that the router chose, [tokens, experts
        per token], largest weight first. `given`: the router's input; `told`: its output (logits,
        weights, experts).
        """
        _, weights, experts = told
        order = weights.argsort(dim=-1, descending=True, stable=True)
        self._chosen.append(experts.gather(-1, order).to("cpu", self._kind))

    @torch.no_grad()
    def _serve(self, requests: Requests, sampling: Sampling) -> None:
        waiting, answered = deque[Request](), 0
        while waiting or (waiting := deque(requests.take(1))):
            completion = self._completion(waiting.popleft(), sampling)
            requests.finished([answered], [completion])
            answered += 1
            if requests.stopped():
                break

    def _media(self, request: Request) -> dict[str, Tensor]:
        """Returns the model inputs (keyword arguments) for the images and videos, or the waveforms,
        of the request's prompt; {} if there are none.
        """
        if self.audio_processor is not None:
            return self._heard(request, self.audio_processor)
        if self.processor is None:
            return {}
        given: dict[str, Tensor] = {}
        for kind, pixels, grids in KINDS_OF_MEDIA:
            shown = images_of(request.images)
            own = [each for each in shown if (each.frames is None) == (kind == "image")]
            if own:
                patches = [self.processor.pixels(each) for each in own]
                given[pixels] = torch.cat(patches).to(self.where)
                given[grids] = torch.tensor([each.grid for each in own], device=self.where)
        return given

    def _heard(self, request: Request, audio_processor: AudioProcessor) -> dict[str, Tensor]:
        own = [each for each in request.images if isinstance(each, PlacedWaveform)]
        if not own:
            return {}
        frames = torch.stack([audio_processor.frames(each.source, each.digest) for each in own])
        lengths = torch.tensor([each.frames for each in own])
        heard = torch.arange(frames.shape[-1]) < lengths[:, None]
        return {
            "input_features": frames.to(self.where),
            "feature_attention_mask": heard.long().to(self.where),
        }

    def _positions(self, request: Request) -> Tensor | None:
        """Returns position ids [3, 1, tokens], as multimodal rotary embeddings need them, for the
        request's prompt and the longest possible completion; None for a model without images.

        The ids are passed explicitly, since transformers computes other positions after a long
        video.
        """
        if self.processor is None:
            return None
        longest = len(request.token_ids) + self.longest
        found = image_positions(images_of(request.images), longest, merge=self.processor.merge)
        return found.T[:, None].to(self.where)

    def _has_stopped(self, ids: Sequence[int]) -> bool:
        """Returns whether the completion so far (`ids`) ends in a stop token or contains a stop
        string.
        """
        if not ids or ids[-1] in self.stop_ids:
            return bool(ids)
        if not self.stop:
            return False
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return any(string in text for string in self.stop)

    def _completion(self, request: Request, sampling: Sampling) -> Completion:
        rng = torch.Generator(self.where).manual_seed(request.seed)
        ids: list[int] = []
        logprobs: list[float] = []
        feed = torch.tensor([list(request.token_ids)], device=self.where)
        media = self._media(request)
        positions = self._positions(request)
        seen = 0
        routes: list[Tensor] = []
        limit = request.limit(self.longest, self.row_tokens)
        caches = self._has_right_cache() or bool(media)
        cache = self._empty_cache()
        while len(ids) < limit and not self._has_stopped(ids):
            self._chosen.clear()
            if positions is not None:
                media["position_ids"] = positions[:, :, seen : seen + feed.shape[1]]
            if caches:
                out = self.model(feed, past_key_values=cache, use_cache=True, **media)
                cache = out.past_key_values
            else:
                out = self.model(feed, use_cache=False)
            media = {}  # from now on it is in the cache
            seen += feed.shape[1]
            if self._chosen:
                before = routes if caches else []  # without a cache a pass is over all tokens
                routes = [*before, torch.stack(self._chosen, dim=1)]
            logp = log_probs_of(out.logits[0, -1].float(), sampling)
            token = (
                int(torch.multinomial(logp.exp(), 1, generator=rng))
                if sampling.temperature
                else int(logp.argmax())
            )
            ids.append(token)
            logprobs.append(float(logp[token]))
            next_token = torch.tensor([[token]], device=self.where)
            feed = next_token if caches else torch.cat([feed, next_token], 1)
        assert self.version is not None
        reason: Literal["stop", "length"] = "stop" if self._has_stopped(ids) else "length"
        chosen = torch.cat(routes) if routes else None
        return Completion(ids, logprobs, reason, self.version, routes=chosen)

    def _has_right_cache(self) -> bool:
        """Returns whether the model's cached forward pass gives the logits of its pass over the whole
        sequence, which isn't so for every architecture of transformers; compared once.
        """
        if self._caches is None:
            ids = torch.arange(3, 3 + CHECKED, device=self.where)[None]
            every = self.model(ids, use_cache=False).logits[0]
            said = "gives other logits than a pass over the whole sequence"
            try:
                own = self.model(ids, past_key_values=None, use_cache=True).past_key_values
                self._has_windows = any(_is_window(each) for each in getattr(own, "layers", ()))
                cache = self._empty_cache()
                for part in (ids[:, : CHECKED // 2], *ids[:, CHECKED // 2 :].split(1, 1)):
                    out = self.model(part, past_key_values=cache, use_cache=True)
                    cache = out.past_key_values
                self._caches = _close(out.logits[0, -1], every[-1])
                half = self.model(ids[:, : CHECKED // 2], use_cache=False).logits[0]
                if not self._caches and not _close(half, every[: CHECKED // 2]):
                    said = (
                        "can't be compared: without it, too, tokens have other logits in a longer sequence (equal scores "
                        "of experts or of tokens to attend to, or tokens that see later ones)"
                    )
            except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                self._caches, said = False, f"can't be used ({error})"
            if not self._caches:
                log.warning(
                    "%s: transformers' cache of this model %s. All tokens are computed for each new one instead, which is slow.",
                    type(self.model).__name__,
                    said,
                )
        return self._caches

    def _empty_cache(self) -> DynamicCache | None:
        """Returns the cache with which a sequence begins; None: the model makes one. transformers' own
        cache of a layer with a window drops older keys, to which some classes (Moshi) still attend:
        all keys are kept, and masks alone decide.
        """
        if not self._has_windows:
            return None
        cache = DynamicCache(config=self.model.config)
        cache.layers = [DynamicLayer() if _is_window(each) else each for each in cache.layers]
        return cache

    @torch.no_grad()
    def _load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Loads the policy's weights, by HF name, into the model. Raises WeightMismatch if a tensor
        is unknown, has another shape, comes twice or is missing.
        """
        own, others = named_as_in_a_folder(self.model), ConvertedNames(self.model, self.folder)
        # number of elements still missing, by storage
        lacking = Counter[int]()
        for place in own.values():
            lacking[_memory(place)] += place.numel()
        loaded = set[str]()
        if self.quantised:
            named_tensors = rounded(named_tensors)
        for name, tensor in named_tensors:
            known, shape = own.get(name), tuple(tensor.shape)
            places = [] if known is None or known.shape != shape else [(known, whole(shape))]
            places = places or others.places_of(name, shape)
            if not places or name in loaded:
                raise WeightMismatch(f"The engine has no {name} of shape {shape}, or got it twice.")
            loaded.add(name)
            for place, box in places:
                lacking[_memory(place)] -= place.numel()
                place.copy_(narrowed(tensor, box))
        missing = [
            name
            for name, place in own.items()
            if name not in loaded and lacking[_memory(place)] > 0
        ]
        if missing:
            raise WeightMismatch(f"The push ended without {sorted(missing)}.")

    def _sleep(self) -> None:
        self.model.to("cpu")

    def _wake(self, parts: Sequence[str]) -> None:
        self.model.to(self.where)
