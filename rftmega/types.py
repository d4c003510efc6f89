"""The nouns that flow: Prompt -> Completion -> Trajectory -> Samples -> Experience -> TokenLoss.

Per-token tensors are [B, T] and aligned with *targets*: column t speaks about token t + 1, so
`logp[b, t]` is the log-probability of `tokens[b, t + 1]` given `tokens[b, : t + 1]`. Rows start at
column 0 (prompt, response, padding). A mask is stored with its row, or made from lengths, never from
token values: a padding id may well be a word.
"""

import itertools
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

Metrics = dict[str, float]
# begins the names of a step's metrics that add up over optimizer steps, such as tokens
COUNT = "count of "


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question as token ids; `label` is what the reward compares the answer with."""

    token_ids: tuple[int, ...]
    label: str = ""
    index: int = 0  # its row in the data set
    kind: str = ""  # of task: decides how answers are scored (reward.recipe)
    # columns of the data set as JSON, with the prompt's text or messages as "prompt", for rewards
    # that read them; "" where none does
    record: str = ""
    task: int = 0  # its number among the prompts that the run draws; seeds depend on it


@dataclass(frozen=True, slots=True)
class Completion:
    """Completion is an engine's answer to one request.

    A truncated answer ("length") keeps its last token; a stopped one ends in the stop token.
    """

    token_ids: tuple[int, ...]
    # of each token, under the distribution it was sampled from (temperature included)
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    policy_version: int
    # of the policy that chose each token, where a push came in between; (): policy_version
    versions: tuple[int, ...] = ()
    routes: Tensor | None = field(default=None, compare=False)
    """[prompt + answer - 1, layers with experts, experts a token] int16: the experts that the
    engine's router sent each fed token to, largest weight first; None of a dense model, or where
    the engine does not tell.
    """


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """Trajectory is one sequence to learn from.

    Two turns with a tool's reply E between them (prompt P, answer A, reply E, answer B) give
    token_ids = P + A + E + B, of which `loss_mask` marks A and B. Tokens are the engine's own:
    nothing is ever tokenised again.
    """

    token_ids: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.bool_]  # [T], True where the policy chose the token
    # [T] of the distribution that was sampled from; 0 where loss_mask is False
    logprobs: NDArray[np.float32]
    # [T] of the policy that chose each token; -1 where loss_mask is False
    versions: NDArray[np.int32]
    truncated: bool = False  # the last answer ended at its limit
    routes: Tensor | None = None  # of the last answer, see Completion

    @staticmethod
    def of(*segments: "Sequence[int] | Completion") -> "Trajectory":
        """Joins segments: token ids are context, completions are what the policy chose."""
        # arrays of the standard library grow faster than those of NumPy are made of lists
        ids, versions, logprobs, mask = array("i"), array("i"), array("f"), bytearray()
        truncated, routes = False, None
        for segment in segments:
            if isinstance(segment, Completion):
                size = len(segment.token_ids)
                ids.extend(segment.token_ids)
                # an answer that was not sampled here has no log-probs
                logprobs.extend(segment.logprobs or (0.0,) * size)
                versions.extend(segment.versions or (segment.policy_version,) * size)
                mask += b"\1" * size
                truncated, routes = segment.finish_reason == "length", segment.routes
            else:
                size = len(segment)
                ids.extend(segment)
                logprobs.extend((0.0,) * size)
                versions.extend((-1,) * size)
                mask += bytes(size)
        return Trajectory(
            np.frombuffer(ids, np.int32),
            np.frombuffer(mask, np.bool_),
            np.frombuffer(logprobs, np.float32),
            np.frombuffer(versions, np.int32),
            truncated,
            routes,
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trajectory):
            return NotImplemented
        names = ("token_ids", "loss_mask", "logprobs", "versions")
        same = (np.array_equal(getattr(self, name), getattr(other, name)) for name in names)
        return self.truncated == other.truncated and all(same)

    @property
    def prompt_length(self) -> int:
        """Returns how many tokens come before the first answer."""
        return int(self.loss_mask.argmax()) if self.loss_mask.any() else len(self)


@dataclass(frozen=True, slots=True)
class Rollout:
    """Rollout holds what an environment made of one task: one trajectory at least, several where it
    rewrote the context between turns.
    """

    trajectories: tuple[Trajectory, ...]
    # by a reward: its parts and their sum, "reward"; None where it was not asked yet
    scores: dict[str, float] | None = None

    @property
    def response_ids(self) -> list[int]:
        """Returns the last trajectory's tokens behind its prompt: answers, and what the environment
        put between them.
        """
        last = self.trajectories[-1]
        ids: list[int] = last.token_ids[last.prompt_length :].tolist()
        return ids

    @property
    def truncated(self) -> bool:
        return self.trajectories[-1].truncated

    @property
    def chosen_tokens(self) -> int:
        """Counts the tokens that the policy chose."""
        return sum(int(trajectory.loss_mask.sum()) for trajectory in self.trajectories)

    @property
    def versions(self) -> set[int]:
        """Returns the policy versions that chose its tokens."""
        parts = [own.versions[own.loss_mask] for own in self.trajectories]
        return set(np.concatenate(parts).tolist())


@dataclass(frozen=True, slots=True)
class Rows:
    """Token rows to score: what a policy needs to know to give log-probabilities."""

    tokens: Tensor  # [B, T + 1] int64: prompt, response, padding
    prompt_lengths: Tensor  # [B] int64: tokens before the first answer
    lengths: Tensor  # [B] int64: prompt and response together
    mask: Tensor  # [B, T] bool, True where the target is a token that the policy chose

    @staticmethod
    def of_answers(tokens: Tensor, prompt_lengths: Tensor, lengths: Tensor) -> "Rows":
        """Returns rows of which everything behind the prompt is the policy's."""
        target = torch.arange(1, tokens.shape[1], device=tokens.device)
        mask = (target >= prompt_lengths[:, None]) & (target < lengths[:, None])
        return Rows(tokens, prompt_lengths, lengths, mask)

    def __len__(self) -> int:
        return len(self.tokens)

    def select(self, index: Tensor) -> "Rows":
        """Returns rows `index` (int64 [b]), trimmed to the longest of them."""
        lengths = self.lengths[index]
        width = int(lengths.max()) if len(index) else 1
        tokens, mask = self.tokens[index, :width], self.mask[index, : width - 1]
        return Rows(tokens, self.prompt_lengths[index], lengths, mask)

    def with_end(self) -> "Rows":
        """Returns the rows with one more place behind each, for scores of whole answers.

        A model is fed all tokens of a row but the last, which is a target only. A value model's
        word on the whole answer is its value after the last token: with a target behind that (0,
        never fed, never predicted) it stands in column lengths - 2 of the longer row.
        `algorithms.supervised.last_value` reads it there.
        """
        return Rows(
            functional.pad(self.tokens, (0, 1)),
            self.prompt_lengths,
            self.lengths + 1,
            functional.pad(self.mask, (0, 1)),
        )


@dataclass(frozen=True, slots=True)
class Samples:
    """Scored answers of one rollout; rows with equal `group` answer the same prompt."""

    prompts: Sequence[Prompt]  # B, one a row
    rows: Rows
    behaviour_logp: Tensor  # [B, T] as the engine reported it; 0 outside the mask
    reward: Tensor  # [B] float
    group: Tensor  # [B] int64
    truncated: Tensor  # [B] bool
    # name -> [B], before weighting; NaN where a prompt's kind doesn't ask for it
    reward_parts: dict[str, Tensor]
    # [B, T] int64: of the policy that chose each token, -1 outside the mask; None: not known
    versions: Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, name: str) -> Tensor:
        """Returns [B] of the reward's part; NaN where an answer, or all of them, have none."""
        return self.reward_parts.get(name, torch.full_like(self.reward, torch.nan))

    def select(self, index: Tensor) -> "Samples":
        """Returns rows `index` (int64 [b]), trimmed to the longest of them."""
        rows = self.rows.select(index)
        return Samples(
            [self.prompts[i] for i in index.tolist()],
            rows,
            self.behaviour_logp[index, : rows.tokens.shape[1] - 1],
            self.reward[index],
            self.group[index],
            self.truncated[index],
            {name: part[index] for name, part in self.reward_parts.items()},
            None if self.versions is None else self.versions[index, : rows.tokens.shape[1] - 1],
        )

    @staticmethod
    def join(parts: "Sequence[Samples]") -> "Samples":
        """Joins several rollouts into one; their groups stay apart."""
        names = dict.fromkeys(name for part in parts for name in part.reward_parts)
        width = max(part.rows.tokens.shape[1] for part in parts)
        before = [0, *itertools.accumulate(int(part.group.max()) + 1 for part in parts)]

        def side_by_side(tensors: Iterable[Tensor], columns: int = 0, fill: int = 0) -> Tensor:
            return torch.cat(
                [
                    functional.pad(x, (0, columns - x.shape[1]), value=fill) if columns else x
                    for x in tensors
                ]
            )

        versions = [part.versions for part in parts if part.versions is not None]

        return Samples(
            [prompt for part in parts for prompt in part.prompts],
            Rows(
                side_by_side((part.rows.tokens for part in parts), width),
                side_by_side(part.rows.prompt_lengths for part in parts),
                side_by_side(part.rows.lengths for part in parts),
                side_by_side((part.rows.mask for part in parts), width - 1),
            ),
            side_by_side((part.behaviour_logp for part in parts), width - 1),
            side_by_side(part.reward for part in parts),
            side_by_side(part.group + first for part, first in zip(parts, before, strict=False)),
            side_by_side(part.truncated for part in parts),
            {name: side_by_side(part.part(name) for part in parts) for name in names},
            side_by_side(versions, width - 1, -1) if len(versions) == len(parts) else None,
        )


@dataclass(frozen=True, slots=True)
class Experience:
    """Experience holds everything of one rollout that a loss may look at, besides the present
    policy's log-probs.
    """

    tokens: Tensor  # [B, T + 1]
    prompt_lengths: Tensor  # [B]
    lengths: Tensor  # [B]
    mask: Tensor  # [B, T] True where the target is a token that is learnt from
    behaviour_logp: Tensor  # [B, T] under the engine that sampled it
    # [B, T] under the trainer, before this rollout's first update; None until its forward pass says
    # it
    old_logp: Tensor | None
    # [B, T] under the reference policy; None where no KL is asked for
    reference_logp: Tensor | None
    advantage: Tensor  # [B, T]
    # [B, T] of the critic, before this rollout's first update; None where there is no critic
    old_value: Tensor | None = None
    returns: Tensor | None = None  # [B, T] what the critic should have said
    # [B, T] of the trainer's distribution at old_logp's time; None where the policy gives none
    entropy: Tensor | None = None
    # [B, T] int64: of the policy that chose each token, -1 outside the mask; None: not known
    versions: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def rows(self) -> Rows:
        return Rows(self.tokens, self.prompt_lengths, self.lengths, self.mask)

    def select(self, index: Tensor) -> "Experience":
        """Returns rows `index` (int64 [b]), trimmed to the longest of them."""
        width = int(self.lengths[index].max()) if len(index) else 1
        extra = self.tokens.shape[1] - width

        def take(value: Tensor | None) -> Tensor | None:
            if value is None or value.dim() == 1:
                return None if value is None else value[index]
            return value[index, : value.shape[1] - extra]

        return self._map(take)

    def to(self, device: torch.device) -> "Experience":
        return self.changed(lambda value: value.to(device))

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Experience":
        """Returns the experience with `change` done to every tensor."""
        return self._map(lambda value: None if value is None else change(value))

    @staticmethod
    def join(parts: "Iterable[Experience]") -> "Experience":
        """Joins the rows of all parts, in their order, as wide as the widest.

        What one of them does not have (None) none has.
        """
        parts = list(parts)
        width = max(part.tokens.shape[1] for part in parts)

        def joined(name: str) -> Tensor | None:
            values = [getattr(part, name) for part in parts]
            if any(value is None for value in values):
                return None
            if values[0].dim() == 1:
                return torch.cat(values)
            fill = -1 if name == "versions" else 0
            missing = [width - part.tokens.shape[1] for part in parts]
            return torch.cat(
                [
                    functional.pad(x, (0, extra), value=fill)
                    for x, extra in zip(values, missing, strict=True)
                ]
            )

        made: dict[str, Any] = {f.name: joined(f.name) for f in fields(Experience)}
        return Experience(**made)

    def _map(self, change: Callable[[Any], Any]) -> "Experience":
        return Experience(**{f.name: change(getattr(self, f.name)) for f in fields(self)})


@dataclass(frozen=True, slots=True)
class TokenStats:
    """TokenStats holds the present policy's log-prob and entropy of each target."""

    logp: Tensor  # [B, T]
    entropy: Tensor | None  # [B, T]; None where nobody asked


@dataclass(frozen=True, slots=True)
class TokenValues:
    """TokenValues holds the value of each state in which a target is chosen."""

    value: Tensor  # [B, T]


@dataclass(frozen=True, slots=True)
class TokenMetric:
    """A metric before anyone has reduced it: its mean is sum(value * weight) / sum(count), over all
    micro-batches and ranks.
    """

    value: Tensor  # [B, T], no gradient
    weight: Tensor  # [B, T]; 0 outside the mask
    count: Tensor  # integer scalar


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss before anyone has reduced it: gradient = d(sum(value * weight)) / (global count)."""

    value: Tensor  # [B, T]
    weight: Tensor  # [B, T]; 0 outside the mask
    # integer scalar: how many things (tokens, sequences) `weight` averages over; the experience
    # alone decides it
    count: Tensor
    # each with a weight of its own: how the loss is scaled changes no metric
    metrics: dict[str, TokenMetric]


# of TokenStats for a policy, of TokenValues for a value model
LossFn = Callable[[Any, Experience], TokenLoss]
Told = Callable[[TokenStats], None]  # of the log-probs before an update, by its own forward pass


@dataclass(frozen=True, slots=True)
class SliceChecksums:
    """A slice of a weight on its way from a trainer's process to an engine's, before the engine
    repacks it.
    """

    name: str  # of the Hugging Face tensor
    box: tuple[tuple[int, int], ...]  # start and stop along each dimension
    source: int  # trainer's process; -1: several
    target: int  # engine's process; -1: all
    held: int | None  # checksum as the trainer holds it now; None: not known
    sent: int | None  # as the last push sent it
    received: int | None  # as it arrived; None: it did not

    @property
    def intact(self) -> bool:
        """Says that the engine was given what the trainer holds."""
        return self.held == self.sent == self.received


@dataclass(frozen=True, slots=True)
class Auxiliary:
    """A second loss in the same optimizer steps: `coef` x its mean, over its own rows and count, is
    added to the first.

    Its rows were not sampled, so they are scored at temperature 1. Its metrics begin with `name`
    and "_".
    """

    name: str
    experience: Experience
    loss_fn: LossFn
    coef: float  # above 0

    def split(self, parts: int) -> "list[Auxiliary]":
        """Splits consecutive rows into `parts` parts, nearly as many in each."""
        indices = torch.arange(len(self.experience)).tensor_split(parts)
        return [replace(self, experience=self.experience.select(index)) for index in indices]
