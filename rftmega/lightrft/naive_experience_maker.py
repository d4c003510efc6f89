"""NaiveExperienceMaker: LightRFT's interface that turns prompts into experiences with advantages.

It delegates to rftmega and contains no formula itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rftmega.algorithms import kl
from rftmega.algorithms.advantages import (
    group_normalised,
    leave_one_out,
    token_rewards,
)
from rftmega.algorithms.gae import discounted_returns, gae
from rftmega.core.interfaces import Reward
from rftmega.core.media_positions import PlacedImage
from rftmega.core.sampling_seeds import sampling_seed
from rftmega.core.types import Completion, Prompt, Rollout, Rows, Sampling, TokenStats, Trajectory
from rftmega.data.media.image_processor import ImageProcessor
from rftmega.lightrft.image_inputs import ANY_NUMBER, PATCHES, ImageInputs, Patches
from rftmega.lightrft.multimodal import build_inputs
from rftmega.lightrft.padded_experience import (
    BEHAVIOUR,
    Experience,
    Samples,
    per_action,
    with_patches,
)
from rftmega.trainer.experience.samples import collect, complete

DEFAULTS: dict[str, Any] = {
    "n_samples_per_prompt": 1,
    "micro_rollout_batch_size": 8,
    "temperature": 1.0,
    "seed": 0,
    "gamma": 1.0,
    "lambd": 0.95,
    "advantage_clip": 0.0,  # bound of the advantages' size; 0: none
}
# further keywords of a call
BESIDE = {
    "labels",
    "all_images",
    "images_num",
    "all_videos",
    "videos_num",
    *PATCHES,
}
REPLACED = {  # LightRFT's rollout keyword -> what determines it in rftmega
    "max_new_tokens": "rollout.max_response_tokens of the engine",
    "max_length": "rollout.max_prompt_tokens and rollout.max_response_tokens of the engine",
    "eos_token_id": "the engine's stop_ids",
    "do_sample": "temperature (0 is greedy)",
}
# advantage_estimator -> rewards [B], group [B] -> rewards [B]
SHAPING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gae": lambda reward, group: reward,
    "reinforce": lambda reward, group: reward,
    "group_norm": group_normalised,
    "rloo": leave_one_out,
    "reinforce_baseline": lambda reward, group: group_normalised(reward, group, scale_by_std=False),
}


class Panel:
    """Panel presents several rewards as one; the score of each reward has the reward's index as its
    name.
    """

    def __init__(self, rewards: Mapping[int, Reward]):
        self.rewards = rewards

    def part(self, *, whole_groups: bool) -> "Panel":
        """Returns a Panel with only the rewards that compare the completions of a group
        (`whole_groups`), or with only the other rewards.
        """
        return Panel(
            {
                place: r
                for place, r in self.rewards.items()
                if getattr(r, "whole_groups", False) is whole_groups
            }
        )

    def __call__(
        self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]
    ) -> list[dict[str, float]]:
        found: list[dict[str, float]] = [{} for _ in rollouts]
        for place, reward in self.rewards.items():
            for scores, score in zip(found, reward(prompts, rollouts), strict=True):
                scores[str(place)] = score["reward"]
        return found

    def judged(self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Returns the rollouts, completions of the `prompts` in the same order, with the scores of
        all rewards.

        Rewards that all rollouts already have a score of are not computed again.
        """
        known = (
            set.intersection(*(set(rollout.scores or {}) for rollout in rollouts))
            if rollouts
            else set()
        )
        missing = Panel(
            {place: reward for place, reward in self.rewards.items() if str(place) not in known}
        )
        if not missing.rewards:
            return list(rollouts)
        pairs = zip(rollouts, missing(prompts, rollouts), strict=True)
        return [
            replace(completion, scores={**(completion.scores or {}), **scores})
            for completion, scores in pairs
        ]


class NaiveExperienceMaker:
    """NaiveExperienceMaker generates samples and computes their experiences. Every process makes
    the same calls with the whole batch.
    """

    def __init__(
        self,
        actor: Any,
        critic: Any,
        reward_model: Any,
        initial_model: Any,
        tokenizer: Any,
        prompt_max_len: int,
        kl_controller: Any,
        strategy: Any = None,
        remote_rm_url: Any = None,
        reward_fn: Callable[..., Tensor] | None = None,
        reward_fn_label_map: dict[str, Any] | None = None,
        reward_recipe: dict[str, Any] | None = None,
        processor: ImageProcessor | None = None,
    ):
        """Takes LightRFT's arguments, which must provide:

        actor: a Policy, with `log_probs(rows) -> TokenStats`; without `strategy` it must be a
        RolloutEngine as well. critic: a value model with `values(rows) -> [B, T]`, or None.
        reward_model: a Reward, `(prompts, rollouts) -> [{"reward": float, ...}]`, or a list of
        Rewards with a `reward_fn`. initial_model: the reference, a Policy, or the actor itself,
        whose `reference_log_probs(rows)` is called; None: no KL. tokenizer: a
        rftmega.data.tokenizer.Tokenizer or a tokenizer of transformers; not needed if all prompts
        are `Prompt`s. kl_controller: `.value` is the weight of each token's KL in the token's
        reward; None: rewards without KL, as when the KL is in the loss. strategy: `.engine` is the
        RolloutEngine; `.args` may hold options (the keys of DEFAULTS, `advantage_estimator`,
        `kl_estimator`); LightRFTStrategy has both attributes. reward_fn: `(list of rewards [B], one
        per reward model) -> [B]`. If `reward_fn_label_map` or `reward_recipe` is given, it is
        passed to reward_fn as the keyword argument `label_map` or `recipe`, together with `labels`.
        processor: image processor of a vision-language model; None: the strategy's, if it has one.

        Raises ValueError if there are several rewards without a `reward_fn`, and for
        `remote_rm_url`: pass a remote reward as a Reward.
        """
        self.actor, self.critic, self.initial_model = actor, critic, initial_model
        rewards: list[Reward] = (
            list(reward_model) if isinstance(reward_model, list | tuple) else [reward_model]
        )
        self.panel = Panel(dict(enumerate(rewards)))
        self.tokenizer, self.prompt_max_len, self.kl_controller, self.strategy = (
            tokenizer,
            prompt_max_len,
            kl_controller,
            strategy,
        )
        if remote_rm_url:
            raise ValueError(
                "remote_rm_url is not read: give reward_model a Reward that asks the server."
            )
        if reward_fn is None and (len(rewards) > 1 or reward_fn_label_map or reward_recipe):
            raise ValueError(
                "Several reward models, a label map or a recipe need a reward_fn that combines the rewards."
            )
        self.reward_fn = reward_fn
        given = {"label_map": reward_fn_label_map, "recipe": reward_recipe}
        self.reward_options = {name: value for name, value in given.items() if value is not None}
        self.pad_id: int = getattr(tokenizer, "pad_token_id", None) or 0
        self.args = getattr(strategy, "args", None)
        self.processor = processor or getattr(strategy, "processor", None)
        self.advantage_estimator: str = getattr(
            self.args, "advantage_estimator", "gae" if critic is not None else "group_norm"
        )
        if self.advantage_estimator not in SHAPING:
            raise ValueError(
                f"advantage_estimator={self.advantage_estimator!r} is unknown. Choose one of {', '.join(SHAPING)}."
            )
        if self.advantage_estimator == "gae" and critic is None:
            raise ValueError(
                "advantage_estimator='gae' needs values: give a critic, or choose another estimator."
            )
        self.kl = kl.ESTIMATORS[getattr(self.args, "kl_estimator", "k1")]
        self.tasks = 0  # prompts so far, so that each gets its own seed

    def generate_samples(self, all_prompts: Sequence[str | Prompt], **kw: Any) -> list[Samples]:
        """Generates `n_samples_per_prompt` completions of each prompt. Returns them in batches of
        `micro_rollout_batch_size`, with the completions of a prompt adjacent.

        `kw` are options with the names in DEFAULTS, and the following. `labels` (a string per
        prompt) are passed to the rewards; a Prompt has its own label. The engine gets all requests
        in one call: a completion depends on its own seed, not on its batch. `all_images` and
        `images_num`, `all_videos` and `videos_num` are images and videos as `gather_and_generate`
        takes them. `pixel_values` and `image_grid_thw`, `pixel_values_videos` and `video_grid_thw`
        replace them for media that are already patches; two successive video frames are then
        assumed to last one second. The engine may score completions as they arrive; a reward that
        compares the completions of a group is called at the end. Raises ValueError for an unknown
        option.
        """
        option = self._options(kw)
        prompts = self._prompts(all_prompts, kw)
        samples = range(option["n_samples_per_prompt"])
        requests = [prompt for prompt in prompts for _ in samples]
        seeds = [
            sampling_seed(option["seed"], self.tasks + place, sample)
            for place in range(len(prompts))
            for sample in samples
        ]
        self.tasks += len(prompts)
        engine = self.actor if self.strategy is None else self.strategy.engine
        at_once = self.panel.part(whole_groups=False)
        asked = {"reward": at_once} if at_once.rewards else {}
        rollouts = self.panel.judged(
            requests,
            complete(
                engine.generate(
                    requests, seeds=seeds, sampling=Sampling(option["temperature"]), **asked
                )
            ),
        )
        group = torch.arange(len(requests)) // option["n_samples_per_prompt"]
        size = option["micro_rollout_batch_size"]
        parts = [slice(begin, begin + size) for begin in range(0, len(requests), size)]
        return [self._samples(requests[part], rollouts[part], group[part]) for part in parts]

    def make_experience(self, samples: Samples) -> Experience:
        """Returns the Experience of a batch with its log-probs, values, KL and, in `info`, rewards.

        Advantages and returns are computed later, by `make_experience_list`.
        """
        patches = Patches.held_by(samples)
        rows = with_patches(samples.rows(), patches, self.processor)
        completions = self._completions(samples)
        if not patches:
            patches = Patches.of(rows.images, self.processor)
        stats: TokenStats = self.actor.log_probs(rows)
        own = per_action(stats.logp, rows)
        base = self._reference(rows)
        mask = per_action(rows.mask, rows)
        penalty = None if base is None else torch.where(mask, self.kl(own - base), 0.0)
        batch = samples if samples.packed_seq_lens is None else samples.batched(pad_id=self.pad_id)
        return Experience(
            sequences=batch.sequences,
            action_log_probs=own,
            base_action_log_probs=base,
            values=None if self.critic is None else per_action(self.critic.values(rows), rows),
            returns=None,
            advantages=None,
            attention_mask=batch.attention_mask,
            action_mask=mask,
            info={
                "reward": self._judge(samples, rows, completions),
                "response_length": samples.response_length,
                "total_length": samples.total_length,
                "truncated": torch.tensor([completion.truncated for completion in completions]),
                "group": torch.arange(len(rows)) if samples.group is None else samples.group,
            }
            | ({} if samples.rollouts is None else {BEHAVIOUR: _reported(completions, mask)}),
            kl=penalty,
            action_entropy=None if stats.entropy is None else per_action(stats.entropy, rows),
            pixel_values=patches.pixel_values,
            image_grid_thw=patches.image_grid_thw,
            pixel_values_videos=patches.pixel_values_videos,
            video_grid_thw=patches.video_grid_thw,
            images=rows.images,
        )

    def make_experience_list(
        self, all_prompts: Sequence[str | Prompt], **kw: Any
    ) -> list[Experience]:
        """Generates and scores all samples, shapes the rewards over all batches, and computes the
        advantages and returns of each batch. Returns the experiences.

        `kw`: options as for `generate_samples`, of which `gamma`, `lambd` and `advantage_clip` are
        used for the advantages. `info["clip_frac"]` [B] is the share of a response's advantages
        that were clipped.
        """
        option = self._options(kw)
        made = [
            self.make_experience(samples) for samples in self.generate_samples(all_prompts, **kw)
        ]
        made, rewards = self.process_experiences(made)
        for experience, reward in zip(made, rewards, strict=True):
            assert experience.action_mask is not None and experience.info is not None
            weight = 0.0 if self.kl_controller is None else self.kl_controller.value
            penalty = None if experience.kl is None else weight * experience.kl
            placed = token_rewards(reward, experience.action_mask, penalty)
            if self.advantage_estimator == "gae":
                assert experience.values is not None
                experience.advantages, experience.returns = self.get_advantages_and_returns(
                    experience.values,
                    placed,
                    experience.action_mask,
                    option["gamma"],
                    option["lambd"],
                )
            else:
                experience.returns = self.get_cumulative_returns(
                    placed, experience.action_mask, option["gamma"]
                )
                experience.advantages = experience.returns.clone()
            experience.advantages, experience.info["clip_frac"] = clipped_advantages(
                experience.advantages, experience.action_mask, option["advantage_clip"]
            )
            experience.info["return"] = placed.sum(-1)
        return made

    def process_experiences(
        self, experiences: list[Experience]
    ) -> tuple[list[Experience], list[Tensor]]:
        """Returns (experiences, rewards [B] of each experience); the rewards are shaped by the
        advantage estimator over all batches at once.

        Override the method to filter experiences. The completions of a group may be in several
        batches.
        """
        if not experiences:
            return [], []
        infos = [experience.info or {} for experience in experiences]
        shaped = SHAPING[self.advantage_estimator](
            torch.cat([info["reward"] for info in infos]),
            torch.cat([info["group"] for info in infos]),
        )
        return experiences, list(shaped.split([len(info["reward"]) for info in infos]))

    def get_advantages_and_returns(
        self, values: Tensor, rewards: Tensor, action_mask: Tensor, gamma: float, lambd: float
    ) -> tuple[Tensor, Tensor]:
        """Returns (advantages, returns), both [B, A], of generalized advantage estimation with
        discount `gamma` and decay `lambd`, from the values, the rewards per token and the action
        mask [B, A]; see `gae`.
        """
        return gae(values, rewards, action_mask, gamma, lambd)

    def get_cumulative_returns(self, rewards: Tensor, action_mask: Tensor, gamma: float) -> Tensor:
        """Returns the returns [B, A], discounted by `gamma` per token, of the rewards per token [B,
        A]; see `discounted_returns`.
        """
        return discounted_returns(rewards, action_mask.bool(), gamma)

    def tokenize_fn(
        self, texts: str | list[str], max_length: int, padding: bool = True, device: Any = None
    ) -> Any:
        """Returns the token ids of texts, each truncated to `max_length`: a dict of left-padded
        input_ids and attention_mask [B, S] on `device`, or, without `padding`, a list with the ids
        of each text.
        """
        ids = [
            self._ids(text)[:max_length] for text in ([texts] if isinstance(texts, str) else texts)
        ]
        if not padding:
            return ids
        width = max(map(len, ids), default=0)
        return {
            "input_ids": torch.tensor(
                [[self.pad_id] * (width - len(each)) + each for each in ids], dtype=torch.int64
            ).to(device),
            "attention_mask": torch.tensor(
                [[0] * (width - len(each)) + [1] * len(each) for each in ids]
            ).to(device),
        }

    def _ids(self, text: str) -> list[int]:
        if callable(self.tokenizer):  # a tokenizer of transformers
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return list(self.tokenizer.encode(text, chat_template=False))

    def _prompts(self, all_prompts: Sequence[str | Prompt], kw: Mapping[str, Any]) -> list[Prompt]:
        labels = kw.get("labels")
        given = [""] * len(all_prompts) if labels is None else list(labels)
        if len(given) != len(all_prompts):
            raise ValueError(f"{len(given)} labels for {len(all_prompts)} prompts: give one each.")
        prompts: list[Prompt] = []
        for index, (prompt, label) in enumerate(zip(all_prompts, given, strict=True)):
            made = prompt if isinstance(prompt, Prompt) else Prompt((), label=label, index=index)
            prompts.append(made)
        found: list[Prompt] = []
        media = self._media(len(prompts), kw)
        for text, prompt, (images, videos) in zip(all_prompts, prompts, media, strict=True):
            if images or videos:
                ids, placed = self._placed(text, images, videos)
                found.append(replace(prompt, token_ids=ids, images=placed))
            elif isinstance(text, str):
                ids = tuple(self.tokenize_fn(text, self.prompt_max_len, padding=False)[0])
                found.append(replace(prompt, token_ids=ids))
            else:
                found.append(prompt)
        return found

    def _media(self, prompts: int, kw: Mapping[str, Any]) -> list[tuple[list[Any], list[Any]]]:
        """Returns (images, videos) of each of `prompts` prompts, from the keyword arguments of
        `generate_samples`.
        """
        given = Patches(**{name: kw.get(name) for name in PATCHES})
        media = []
        for files, values, grids in (
            ("all_images", "pixel_values", "image_grid_thw"),
            ("all_videos", "pixel_values_videos", "video_grid_thw"),
        ):
            patches, grid, own = getattr(given, values), getattr(given, grids), kw.get(files)
            if (patches is None) != (grid is None) or (own is not None and patches is not None):
                raise ValueError(f"Give {files}, or {values} and {grids}, both of them.")
            if patches is not None:
                cut = self._images()
                own = (cut.cut if files == "all_images" else cut.cut_videos)(patches, grid)
            media.append(own)
        images, videos = media
        built = build_inputs(
            [""] * prompts, images, kw.get("images_num"), videos, kw.get("videos_num")
        )
        data = [each.get("multi_modal_data", {}) for each in built]
        return [(each.get("image", []), each.get("video", [])) for each in data]

    def _placed(
        self, text: str | Prompt, images: list[Any], videos: list[Any]
    ) -> tuple[tuple[int, ...], tuple[PlacedImage, ...]]:
        given = text if isinstance(text, str) else text.token_ids
        ids, placed = self._images().prompt(given, images, videos)
        if len(ids) > self.prompt_max_len:
            raise ValueError(
                f"A prompt has {len(ids)} tokens with its {len(placed)} images or videos, and prompt_max_len is "
                f"{self.prompt_max_len}. Raise it: a prompt with images is not cut off."
            )
        return ids, placed

    def _images(self) -> ImageInputs:
        if self.processor is None:
            raise ValueError(
                "There are images, and neither a `processor` nor a strategy with one. Give that of a model that sees."
            )
        return ImageInputs(
            self.processor,
            self._ids,
            most=getattr(self.strategy, "most_images", ANY_NUMBER),
            options=getattr(self.strategy, "data_options", None),
        )

    def _options(self, kw: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the value of each option in DEFAULTS: from `kw`, else from the strategy's args,
        else the default. Raises ValueError for an unknown option.
        """
        for name in kw.keys() - DEFAULTS.keys() - BESIDE:
            why = (
                f"{REPLACED[name]} decides it"
                if name in REPLACED
                else f"options are {', '.join([*sorted(BESIDE), *DEFAULTS])}"
            )
            raise ValueError(f"{name}={kw[name]!r} is not read here: {why}.")
        return {
            name: kw.get(name, getattr(self.args, name, default))
            for name, default in DEFAULTS.items()
        }

    def _samples(self, prompts: list[Prompt], rollouts: list[Rollout], group: Tensor) -> Samples:
        # dummy rewards: only the rows are used
        silent = [replace(completion, scores={"reward": 0.0}) for completion in rollouts]
        rows = collect(prompts, silent, self.panel, samples_per_prompt=1).rows.padded()
        made = Samples.of(
            rows,
            prompts=list(prompts),
            labels=[prompt.label for prompt in prompts],
            pad_id=self.pad_id,
        )
        made.rollouts, made.group = rollouts, group
        patches = Patches.of(made.images, self.processor)
        for name in PATCHES:
            setattr(made, name, getattr(patches, name))
        return made

    def _completions(self, samples: Samples) -> list[Rollout]:
        """Returns the rollouts of the samples. If an engine has not generated the samples, builds
        rollouts from their rows.
        """
        if samples.rollouts is not None:
            return samples.rollouts
        rows = samples.rows()
        pairs = zip(
            rows.tokens.tolist(), rows.prompt_lengths.tolist(), rows.lengths.tolist(), strict=True
        )
        return [Rollout((_given(ids[:begin], ids[begin:end]),)) for ids, begin, end in pairs]

    def _judge(self, samples: Samples, rows: Rows, completions: list[Rollout]) -> Tensor:
        pairs = zip(
            rows.tokens.tolist(),
            rows.prompt_lengths.tolist(),
            samples.prompts,
            samples.labels,
            strict=True,
        )
        prompts = [
            given if isinstance(given, Prompt) else Prompt(tuple(ids[:end]), label)
            for ids, end, given, label in pairs
        ]
        scores = [completion.scores or {} for completion in self.panel.judged(prompts, completions)]
        parts = [
            torch.tensor([score[str(place)] for score in scores], dtype=torch.float32)
            for place in self.panel.rewards
        ]
        if self.reward_fn is None:
            return parts[0]
        labels = {"labels": samples.labels} if self.reward_options else {}
        return self.reward_fn(parts, **labels, **self.reward_options)

    def _reference(self, rows: Rows) -> Tensor | None:
        if self.initial_model is None:
            return None
        same = self.initial_model is self.actor
        stats = self.actor.reference_log_probs(rows) if same else self.initial_model.log_probs(rows)
        return per_action(stats.logp, rows)


def clipped_advantages(
    advantages: Tensor, action_mask: Tensor, bound: float
) -> tuple[Tensor, Tensor]:
    """Returns (advantages [B, A] clipped to [-bound, bound], share of each response's tokens [B]
    whose advantage was clipped); a `bound` of 0 clips nothing. Advantages outside the mask are 0.
    """
    found = advantages.clamp(-bound, bound) if bound else advantages
    return found, (found != advantages).sum(-1) / action_mask.sum(-1).clamp(min=1)


def _reported(completions: Sequence[Rollout], mask: Tensor) -> Tensor:
    """Returns the log-probs [B, A] that the engine reported for the responses, 0 after the end of a
    response; `mask` [B, A] is True for response tokens.
    """
    found = torch.zeros(mask.shape)
    chosen = (own for completion in completions for own in completion.trajectories)
    found[mask] = torch.from_numpy(np.concatenate([own.logprobs[own.loss_mask] for own in chosen]))
    return found


def _given(prompt: list[int], response: list[int]) -> Trajectory:
    """Returns the trajectory of a prompt and a response that no engine has generated, so that it
    has no log-probs.
    """
    return Trajectory.of(prompt, Completion(response, (), "stop", -1))
