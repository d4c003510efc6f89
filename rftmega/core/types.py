"""Data types of the training loop: Prompt -> Completion -> Trajectory -> Samples -> Experience ->
TokenLoss.

Columns hold one value per token of each row. All columns but the tokens are aligned with *targets*:
index t belongs to token t + 1, so `logp[b, t]` is the log-probability of `tokens[b, t + 1]` given
`tokens[b, : t + 1]`, and a row of n tokens has n - 1 targets. A whole rollout has Ragged columns; a
micro-batch, the input of models and losses, has padded ones: tensors [B, T]. Padded rows start at
column 0 (prompt, response, padding). Masks are stored with their rows or made from lengths, never
from token values, because the padding id may be a regular token.
"""

import itertools
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from typing_extensions import TypeVar

from rftmega.core import expert_routes
from rftmega.core.media_positions import Placed, RowImages, placed_from_state
from rftmega.core.ragged import Ragged
from rftmega.core.teacher_scores import TeacherScores, joined_scores

Metrics = dict[str, float]
# prefix of a step's metrics that add up over optimizer steps, such as tokens
COUNT = "count of "
# a column of a batch: padded, [B, T], or Ragged
Column = TypeVar("Column", Tensor, Ragged, default=Tensor)
UNKNOWN = -1  # pads rows of versions


class Taught(NamedTuple):
    """Taught holds the columns of a prompt's record that one teacher reads."""

    token_ids: tuple[int, ...] = ()  # the teacher's own prompt; (): the policy's
    gate: float | None = None  # the teacher's mean score on the prompt; None: there is no gate


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task's prompt as token ids; `label` is the reference answer that the
    reward compares with.
    """

    token_ids: tuple[int, ...]
    label: str = ""
    index: int = 0  # its row in the data set
    kind: str = ""  # task type, which decides how completions are scored (reward.recipe)
    # columns of the data set as JSON, with the prompt's text or messages as "prompt", for rewards
    # that read them; "" if none does
    record: str = ""
    task: int = 0  # its number among the prompts that the run draws; seeds depend on it
    # in the order of their positions; `token_ids` has one placeholder per feature
    images: tuple[Placed, ...] = ()
    # one per teacher, None for one that does not teach the prompt; (): all teach it alike
    teachers: tuple[Taught | None, ...] = ()

    def state(self) -> list[Any]:
        """Returns the prompt as a JSON list; images that are not in a file become tensors."""
        plain = [self.label, self.index, self.kind, self.record, self.task]
        images = [each.state() for each in self.images]
        teachers = [each and [list(each.token_ids), each.gate] for each in self.teachers]
        return [list(self.token_ids), *plain, images, teachers]

    @staticmethod
    def from_state(state: Sequence[Any]) -> "Prompt":
        """Restores a prompt from the list that `state` returned; checkpoints before format 4 have
        fewer fields.
        """
        token_ids, *plain = state[:6]
        known = dict(zip(("label", "index", "kind", "record", "task"), plain, strict=False))
        images = state[6] if len(state) > 6 else ()
        teachers = state[7] if len(state) > 7 else ()
        return Prompt(
            tuple(token_ids),
            **known,
            images=tuple(map(placed_from_state, images)),
            teachers=tuple(each and Taught(tuple(each[0]), each[1]) for each in teachers),
        )


class Sampling(NamedTuple):
    """Sampling is the distribution that an engine draws tokens from.

    Filters apply in vLLM's order to softmax(logits / temperature): tokens with at least `min_p`
    times the largest probability, of these the `top_k` likeliest, of these, renormalised, the
    smallest set whose probabilities sum to `top_p` or more.
    """

    temperature: float = 1.0  # 0: greedy, without filters
    top_p: float = 1.0
    top_k: int = 0  # 0: any number
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """Completion is an engine's result for one request.

    A truncated completion ("length") keeps its last token; a stopped one ends with the stop token,
    or with the token that completed a stop string.

    Token ids, log-probs and versions given as other sequences become arrays of 4-byte elements.
    """

    token_ids: Sequence[int]
    # of each token, under the `Sampling` it was drawn from
    logprobs: Sequence[float]
    finish_reason: Literal["stop", "length"]
    policy_version: int
    # policy version of each token, if weights were pushed meanwhile; empty: policy_version
    versions: Sequence[int] = ()
    # of prompt + completion - 1 tokens, see expert_routes; None: a dense model, or not requested
    routes: Tensor | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name, kind in (("token_ids", "i"), ("logprobs", "f"), ("versions", "i")):
            given = getattr(self, name)
            if not isinstance(given, array):
                object.__setattr__(self, name, array(kind, given))


class Turn(NamedTuple):
    """Turn is a message of a conversation and its token range in a trajectory.

    A turn of the policy is a completion including its end token. Other turns cover the message
    itself, without the chat template's tokens around it.
    """

    role: str  # "assistant" is the policy, "tool" and "user" are the environment
    start: int
    stop: int
    name: str = ""  # of the tool
    reward: float = 0.0  # the environment's reward for this turn; a rollout's scores have the sum


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """Trajectory is one sequence to train on.

    Two turns with a tool's reply E between them (prompt P, completion A, reply E, completion B)
    give token_ids = P + A + E + B, of which `loss_mask` marks A and B. Tokens are the engine's own
    and are never tokenised again.
    """

    token_ids: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.bool_]  # [T], True where the policy chose the token
    # [T] under the sampling distribution; 0 where loss_mask is False
    logprobs: NDArray[np.float32]
    # [T] policy version of each token; -1 where loss_mask is False
    versions: NDArray[np.int32]
    truncated: bool = False  # the last completion reached its maximum length
    routes: Tensor | None = None  # of the T tokens, see expert_routes; None: not known
    turns: tuple[Turn, ...] = ()  # after the prompt; () if the environment does not record them

    @staticmethod
    def of(*segments: "Sequence[int] | Completion", turns: tuple[Turn, ...] = ()) -> "Trajectory":
        """Builds a trajectory from segments: token ids are context, Completions are tokens chosen
        by the policy.
        """
        # growing arrays of the standard library is faster than making NumPy arrays of lists
        ids, versions, logprobs, mask = array("i"), array("i"), array("f"), bytearray()
        truncated = False
        routes: Tensor | None = None
        for segment in segments:
            if isinstance(segment, Completion):
                fed = len(ids) + len(segment.token_ids) - 1
                if segment.routes is not None and len(segment.routes) == fed:
                    routes = expert_routes.joined(routes, segment.routes)
                size = len(segment.token_ids)
                ids.extend(segment.token_ids)
                # a completion that was not sampled here has no log-probs
                logprobs.extend(segment.logprobs or (0.0,) * size)
                versions.extend(segment.versions or (segment.policy_version,) * size)
                mask += b"\1" * size
                truncated = segment.finish_reason == "length"
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
            None if routes is None else expert_routes.to_length(routes, len(ids)),
            turns,
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trajectory):
            return NotImplemented
        names = ("token_ids", "loss_mask", "logprobs", "versions")
        same = (np.array_equal(getattr(self, name), getattr(other, name)) for name in names)
        return (self.truncated, self.turns) == (other.truncated, other.turns) and all(same)

    @property
    def prompt_length(self) -> int:
        """Returns the number of tokens before the first completion."""
        return int(self.loss_mask.argmax()) if self.loss_mask.any() else len(self)


@dataclass(frozen=True, slots=True)
class Rollout:
    """Rollout holds the result of an environment for one task: one trajectory, or several if the
    context was rewritten between turns. All trajectories of a rollout share its reward and weight.
    """

    trajectories: tuple[Trajectory, ...]
    # reward components and their sum, "reward"; None if not scored yet
    scores: dict[str, float] | None = None
    # the environment's reward components, by name, with the weights of reward.environment
    rewards: dict[str, float] = field(default_factory=dict)
    # the environment's measures (turns, tool calls), by name; metrics are means over rollouts
    measures: dict[str, float] = field(default_factory=dict)
    # the reason for leaving it out: something other than the policy failed; "": not left out
    lost: str = ""
    score_zero: bool = False  # its reward is 0 in every component

    @property
    def response_ids(self) -> list[int]:
        """Returns the response that rewards score: the policy's last turn if the environment
        records turns, otherwise everything after the prompt in the last trajectory.
        """
        begin, end = self._response
        ids: list[int] = self.trajectories[-1].token_ids[begin:end].tolist()
        return ids

    @property
    def context_ids(self) -> list[int]:
        """Returns the tokens of the last trajectory before its `response_ids`."""
        ids: list[int] = self.trajectories[-1].token_ids[: self._response[0]].tolist()
        return ids

    @property
    def _response(self) -> tuple[int, int]:
        last = self.trajectories[-1]
        completions = [turn for turn in last.turns if turn.role == "assistant"]
        return completions[-1][1:3] if completions else (last.prompt_length, len(last))

    @property
    def truncated(self) -> bool:
        return self.trajectories[-1].truncated

    @property
    def chosen_tokens(self) -> int:
        """Returns the number of tokens that the policy chose."""
        return sum(int(trajectory.loss_mask.sum()) for trajectory in self.trajectories)

    @property
    def versions(self) -> set[int]:
        """Returns the policy versions that chose the rollout's tokens."""
        parts = [own.versions[own.loss_mask] for own in self.trajectories]
        return set(np.concatenate(parts).tolist())


@dataclass(frozen=True, slots=True)
class Rows(Generic[Column]):
    """Token rows to score: the inputs from which a policy computes log-probs."""

    tokens: Column  # token ids: prompt, response
    prompt_lengths: Tensor  # [B] int64: tokens before the first completion
    lengths: Tensor  # [B] int64: prompt and response together
    mask: Column  # bool, True where the target is a token that the policy chose
    images: RowImages | None = None  # of the rows; None where none has one
    # of each token but the last, see expert_routes; None: the router chooses
    routes: Column | None = None
    unsafe: Tensor | None = None  # [B] bool: the response is harmful; None: not known
    desirable: Tensor | None = None  # [B] bool: the response is preferred; None: no preferences
    # [B] float64: log-prob of the response under the reference; None: not read
    reference_sum: Tensor | None = None

    @staticmethod
    def of_completions(tokens: Tensor, prompt_lengths: Tensor, lengths: Tensor) -> "Rows":
        """Returns rows in which the policy chose every token after the prompt."""
        target = torch.arange(1, tokens.shape[1], device=tokens.device)
        mask = (target >= prompt_lengths[:, None]) & (target < lengths[:, None])
        return Rows(tokens, prompt_lengths, lengths, mask)

    def __len__(self) -> int:
        return len(self.lengths)

    def select(self, index: Tensor) -> "Rows[Column]":
        """Returns the rows at `index` (int64 [b]); padded rows are trimmed to the longest of them."""
        return _selected(self, index)

    def padded(self) -> "Rows":
        """Returns the rows as model inputs: padded, with token ids in int64."""
        return _padded(self)

    def ragged(self) -> "Rows[Ragged]":
        """Returns the rows with Ragged columns instead of padded ones."""
        return _ragged(self)

    def like(self, stats: Any) -> Any:
        """Converts statistics of these rows (TokenStats, TokenValues) from padded columns to Ragged
        ones if the rows are Ragged.
        """
        if not isinstance(self.tokens, Ragged):
            return stats
        targets = (self.lengths - 1).clamp(min=0)
        own = [getattr(stats, each.name) for each in fields(stats)]
        columns = [Ragged.of_padded(x, targets) if isinstance(x, Tensor) else x for x in own]
        return type(stats)(*columns)

    def with_end(self) -> "Rows[Column]":
        """Returns the rows with one more position at the end of each, for scores of whole
        completions.

        The last token of a row is a target but never a model input. A value model scores a whole
        completion by its value after the last token. With one more target after the last token (id
        0, never a model input and never predicted) this value is in column lengths - 2 of the
        longer row, where `algorithms.supervised.last_value` reads it. Expert routes belong to a
        policy and are left out.
        """

        def longer(column: Any) -> Any:
            if isinstance(column, Ragged):
                return column.extended()
            return functional.pad(column, (0, 1))

        return Rows(
            longer(self.tokens),
            self.prompt_lengths,
            self.lengths + 1,
            longer(self.mask),
            self.images,
            unsafe=self.unsafe,
        )


@dataclass(frozen=True, slots=True)
class Samples(Generic[Column]):
    """Scored trajectories of one rollout phase; rows with equal `group` belong to the same prompt.

    Rows of the same rollout are adjacent, and each row repeats the rollout's reward, group and
    measures.
    """

    prompts: Sequence[Prompt]  # B, one a row
    rows: Rows[Column]
    behaviour_logp: Column  # as reported by the engine; 0 outside the mask
    reward: Tensor  # [B] float
    group: Tensor  # [B] int64
    truncated: Tensor  # [B] bool
    # name -> [B], before weighting; NaN if not part of a prompt's task type
    reward_parts: dict[str, Tensor]
    # of the policy that chose each token, -1 outside the mask; None: not known
    versions: Column | None = None
    # [B] int64: number of the rollout; None: each row is one
    rollout: Tensor | None = None
    # B, one per row, see Trajectory.turns; () if no environment records turns
    turns: Sequence[tuple[Turn, ...]] = ()
    measures: dict[str, Tensor] = field(
        default_factory=dict
    )  # name -> [B], NaN where there is none

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> Tensor:
        return self.rows.lengths

    @property
    def rollouts(self) -> "RowsOfRollouts":
        """Returns the assignment of rows to rollouts."""
        return RowsOfRollouts.of(self.rollout, len(self))

    def part(self, name: str) -> Tensor:
        """Returns the reward component `name` of each row, [B]; NaN for rows without this
        component.
        """
        return self.reward_parts.get(name, torch.full_like(self.reward, torch.nan))

    def measured(self, name: str) -> Tensor:
        """Returns the environment's measure `name` of each row, [B]; NaN for rows without this
        measure.
        """
        return self.measures.get(name, torch.full_like(self.reward, torch.nan))

    def select(self, index: Tensor) -> "Samples[Column]":
        """Returns the rows at `index` (int64 [b]); padded rows are trimmed to the longest of them."""
        return _selected(self, index)

    def padded(self) -> "Samples":
        """Returns the samples with padded columns."""
        return _padded(self)

    @staticmethod
    def join(
        parts: "Sequence[Samples[Ragged]]",
        once: Callable[[Callable[[], Any]], Any] = lambda make: make(),
    ) -> "Samples[Ragged]":
        """Joins the samples of several rollout phases; groups of different phases stay separate.

        `once`: the method `once` of a Host, to keep one copy of the joined columns per host.
        """
        if len(parts) == 1:
            return parts[0]
        names = dict.fromkeys(name for part in parts for name in part.reward_parts)
        measured = dict.fromkeys(name for part in parts for name in part.measures)
        groups = _numbered_on([part.group for part in parts])
        rows = [part.rows for part in parts]
        versions = [part.versions for part in parts if part.versions is not None]

        def joined() -> tuple[Any, ...]:
            return (
                Ragged.join([part.tokens for part in rows]),
                Ragged.join([part.mask for part in rows]),
                Ragged.join([part.behaviour_logp for part in parts]),
                Ragged.join(versions) if len(versions) == len(parts) else None,
                _joined_routes(rows),
            )

        tokens, mask, behaviour_logp, own_versions, own_routes = once(joined)
        return Samples(
            [prompt for part in parts for prompt in part.prompts],
            Rows(
                tokens,
                torch.cat([part.prompt_lengths for part in rows]),
                tokens.lengths,
                mask,
                RowImages.join([part.images for part in rows], [len(part) for part in rows]),
                own_routes,
            ),
            behaviour_logp,
            torch.cat([part.reward for part in parts]),
            torch.cat(groups),
            torch.cat([part.truncated for part in parts]),
            {name: torch.cat([part.part(name) for part in parts]) for name in names},
            own_versions,
            torch.cat(_numbered_on([part.rollouts.of_row for part in parts])),
            [own for part in parts for own in part.turns or [()] * len(part)],
            {name: torch.cat([part.measured(name) for part in parts]) for name in measured},
        )


class Preferences(NamedTuple):
    """Preferences holds the rows of a batch of preference data.

    Of pairs, row 2i is the chosen and row 2i + 1 the rejected response of pair i.
    """

    rows: Rows
    # one per row: its prompt with the response to another prompt; None unless KTO reads them
    mismatched: Rows | None = None


class RowsOfRollouts(NamedTuple):
    """RowsOfRollouts assigns the B rows of a batch to its R rollouts; rows of the same rollout are
    adjacent.
    """

    first: Tensor  # [R] int64: the first row of each rollout
    of_row: Tensor  # [B] int64: the rollout of each row, numbered from 0
    sizes: Tensor  # [R] int64: the number of rows of each rollout

    @staticmethod
    def of(rollout: Tensor | None, rows: int) -> "RowsOfRollouts":
        """Builds the assignment from the rollout number of each row, [B] int64; None: each row is a
        rollout.
        """
        if rollout is None:
            each = torch.arange(rows)
            return RowsOfRollouts(each, each, torch.ones_like(each))
        _, of_row, sizes = rollout.unique_consecutive(return_inverse=True, return_counts=True)
        return RowsOfRollouts(sizes.cumsum(0) - sizes, of_row, sizes)

    def sums(self, of_rows: Tensor) -> Tensor:
        """Returns [R]: the sum of `of_rows` ([B]) over the rows of each rollout."""
        return of_rows.new_zeros(len(self.first)).index_add(0, self.of_row, of_rows)


def _numbered_on(parts: Sequence[Tensor]) -> list[Tensor]:
    """Renumbers the parts ([B] int64 each, numbered from 0) so that no number occurs in two parts."""
    most = [int(part.max()) + 1 if len(part) else 0 for part in parts]
    before = [0, *itertools.accumulate(most)]
    return [part + first for part, first in zip(parts, before, strict=False)]


def _joined_routes(parts: "Sequence[Rows[Ragged]] | Sequence[Experience[Ragged]]") -> Ragged | None:
    """Returns the joined expert routes of all parts; tokens of a part without routes get the value
    `expert_routes.unknown`. Returns None if no part has routes.
    """
    known = [part.routes for part in parts if part.routes is not None]
    if not known:
        return None
    nothing = known[0].values[:0]
    found = []
    for part in parts:
        targets = (part.lengths - 1).clamp(min=0)
        unknown = expert_routes.to_length(nothing, int(targets.sum()))
        found.append(Ragged.packed(unknown, targets) if part.routes is None else part.routes)
    return Ragged.join(found)


class Shares(NamedTuple):
    """Weights of a batch's rows in a loss that averages over rollouts, so that a rollout of several
    rows counts once; None: each row is a rollout.
    """

    share: Tensor | None = None  # [B] float32, see Experience
    leads: Tensor | None = None  # [B] bool, see Experience


EACH_ROW = Shares()


@dataclass(frozen=True, slots=True)
class Experience(Generic[Column]):
    """Experience holds all data of one rollout phase that a loss may use, except the current
    policy's log-probs.
    """

    tokens: Column
    prompt_lengths: Tensor  # [B]
    lengths: Tensor  # [B]
    mask: Column  # True where the target is a token to train on
    behaviour_logp: Column  # under the engine that sampled it
    # under the trainer, before this rollout's first update; None until its forward pass. The
    # update's own forward pass computes it for the mask's tokens only, and gives 0 for others
    old_logp: Column | None
    reference_logp: Column | None  # under the reference policy; None without KL
    advantage: Column
    # of the critic, before this rollout's first update; None without a critic
    old_value: Column | None = None
    returns: Column | None = None  # the critic's targets
    # of the trainer's distribution when old_logp was computed; None if the policy returns none
    entropy: Column | None = None
    # integers: policy version of each token, -1 outside the mask; None: not known
    versions: Column | None = None
    images: RowImages | None = None  # of the rows; None where none has one
    # [B] int64: number of the rollout, whose rows are adjacent; None: each row is one
    rollout: Tensor | None = None
    # [B] float32: the row's share of its rollout's trained tokens
    share: Tensor | None = None
    # [B] bool: True for one row per rollout, with which rollouts are counted
    leads: Tensor | None = None
    # expert routes used in the policy's update, see Rows; None: the router chooses
    routes: Column | None = None
    unsafe: Tensor | None = None  # [B] bool, see Rows
    desirable: Tensor | None = None  # [B] bool, see Rows
    reference_sum: Tensor | None = None  # [B] float64, see Rows
    # [B] float64: KTO's estimate of the KL to the reference, the same for all rows of a step
    kl_baseline: Tensor | None = None
    # of each teacher whose divergence is part of the loss
    teachers: tuple[TeacherScores, ...] = ()
    # teacher -> its log-probs of the sampled tokens, NaN where it does not teach
    teacher_logp: dict[str, Column] = field(default_factory=dict)
    # teacher with a prompt of its own -> this prompt's token ids, of rows that may be replayed
    teacher_prompts: dict[str, Ragged] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def rows(self) -> Rows[Column]:
        return Rows(
            self.tokens,
            self.prompt_lengths,
            self.lengths,
            self.mask,
            self.images,
            self.routes,
            self.unsafe,
        )

    @property
    def rollouts(self) -> RowsOfRollouts:
        """Returns the assignment of rows to rollouts."""
        return RowsOfRollouts.of(self.rollout, len(self))

    @property
    def shares(self) -> Shares:
        return Shares(self.share, self.leads)

    def select(self, index: Tensor) -> "Experience[Column]":
        """Returns the rows at `index` (int64 [b]); padded rows are trimmed to the longest of them."""
        return _selected(self, index)

    def padded(self) -> "Experience":
        """Returns the experience with padded columns, the input of a loss."""
        return _padded(self)

    def ragged(self) -> "Experience[Ragged]":
        """Returns the experience with Ragged columns instead of padded ones."""
        return _ragged(self)

    def to(self, device: torch.device) -> "Experience[Column]":
        """Returns the experience on `device`. Copies to an accelerator are asynchronous and ordered
        before the device's later work.
        """
        aside = device.type != "cpu"  # the host could read unfinished copies
        return self.changed(lambda value: value.to(device, non_blocking=aside))

    def changed(self, change: Callable[[Any], Any]) -> "Experience[Column]":
        """Returns the experience with `change` applied to every column and tensor."""
        return _mapped(self, lambda name, value: change(value))

    @staticmethod
    def join(parts: "Iterable[Experience[Ragged]]") -> "Experience[Ragged]":
        """Joins the rows of all parts, in their order.

        A field that is None in one part is None in the result, except for expert routes: tokens of
        parts without routes get the value `expert_routes.unknown`.
        """
        parts = list(parts)

        def joined(name: str) -> Any:
            values = [getattr(part, name) for part in parts]
            if name == "routes":
                return _joined_routes(parts)
            if name == "images":
                return RowImages.join(values, [len(part) for part in parts])
            if name == "teachers":
                return joined_scores(values)
            if name in ("teacher_logp", "teacher_prompts"):
                return {each: Ragged.join([own[each] for own in values]) for each in values[0]}
            if any(value is None for value in values):
                return None
            if name == "rollout":
                return torch.cat(_numbered_on(values))
            return Ragged.join(values) if isinstance(values[0], Ragged) else torch.cat(values)

        made: dict[str, Any] = {each.name: joined(each.name) for each in fields(Experience)}
        return Experience(**made)


def _mapped(batch: Any, change: Callable[[str, Any], Any]) -> Any:
    """Returns the batch with every column and tensor except None replaced by change(name, value)."""
    found: dict[str, Any] = {}
    for each in fields(batch):
        value = getattr(batch, each.name)
        if isinstance(value, Rows):
            value = _mapped(value, change)
        elif isinstance(value, RowImages):
            pass  # independent of the columns' layout
        elif isinstance(value, dict):
            value = {name: change(name, part) for name, part in value.items()}
        elif value is not None and each.name not in ("prompts", "turns", "teachers"):
            value = change(each.name, value)
        found[each.name] = value
    return type(batch)(**found)


def _selected(batch: Any, index: Tensor) -> Any:
    width = int(batch.lengths[index].max()) if len(index) else 1

    def chosen(name: str, value: Any) -> Any:
        if isinstance(value, Ragged):
            return value.select(index)
        if value.dim() == 1:
            return value[index]
        return value[index, : width if name == "tokens" else width - 1]

    found = _mapped(batch, chosen)
    if isinstance(batch, Samples):
        rows = _with_images(found.rows, batch.rows.images, index)
        own = [batch.prompts[row] for row in index.tolist()]
        turns = [batch.turns[row] for row in index.tolist()] if batch.turns else ()
        return replace(found, rows=rows, prompts=own, turns=turns)
    if isinstance(batch, Experience):
        found = replace(found, teachers=tuple(each.select(index) for each in batch.teachers))
    return _with_images(found, batch.images, index)


def _with_images(batch: Any, images: RowImages | None, index: Tensor) -> Any:
    """Returns the batch with the images of the selected rows `index`."""
    if images is None:
        return batch
    return replace(batch, images=RowImages.of(images.select(index.tolist()).rows))


def _padded(batch: Any) -> Any:
    width = int(batch.lengths.max()) if len(batch) else 1

    def padded(name: str, value: Any) -> Any:
        if not isinstance(value, Ragged) or name == "teacher_prompts":
            return value
        if name == "tokens":
            return value.padded(width=width).long()
        fills = {"versions": UNKNOWN}
        if name == "routes":
            fills[name] = expert_routes.unknown(value.values.dtype)
        return value.padded(width=width - 1, fill=fills.get(name, 0))

    return _mapped(batch, padded)


def _ragged(batch: Any) -> Any:
    targets = (batch.lengths - 1).clamp(min=0)

    def ragged(name: str, value: Any) -> Any:
        if isinstance(value, Ragged) or value.dim() == 1:
            return value
        return Ragged.of_padded(value, batch.lengths if name == "tokens" else targets)

    return _mapped(batch, ragged)


@dataclass(frozen=True, slots=True)
class TokenStats(Generic[Column]):
    """TokenStats holds the current policy's log-prob and entropy of each target."""

    logp: Column
    entropy: Column | None  # None if not requested
    routes: Column | None = None  # of the tokens, see expert_routes; None: not requested
    # [B, T, teachers]: from each of `Experience.teachers`; None without a teacher
    divergence: Column | None = None


@dataclass(frozen=True, slots=True)
class TokenValues(Generic[Column]):
    """TokenValues holds, for each target, the value that a value model gives the state in which the
    target is chosen, i.e. the tokens before the target.
    """

    value: Column


@dataclass(frozen=True, slots=True)
class TokenMetric:
    """A metric before reduction: its mean is sum(value * weight) / sum(count), summed over all
    micro-batches and ranks.
    """

    value: Tensor  # [B, T], no gradient
    weight: Tensor  # [B, T]; 0 outside the mask
    count: Tensor  # integer scalar


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss before reduction: its gradient is d(sum(value * weight)) / (count summed over all
    micro-batches and ranks).
    """

    value: Tensor  # [B, T]
    weight: Tensor  # [B, T]; 0 outside the mask
    # integer scalar: the number of items (tokens, sequences) that `weight` averages over; depends
    # on the experience alone
    count: Tensor
    # each has a separate weight, so that scaling the loss changes no metric
    metrics: dict[str, TokenMetric]


# takes the TokenStats of a policy or the TokenValues of a value model
LossFn = Callable[[Any, Experience], TokenLoss]
Told = Callable[
    [TokenStats[Any]], None
]  # receives the log-probs before an update, from its own forward pass


@dataclass(frozen=True, slots=True)
class SliceChecksums:
    """Checksums of a slice of a weight on its way from a trainer process to an engine process,
    before the engine repacks it.
    """

    name: str  # Hugging Face tensor name
    box: tuple[tuple[int, int], ...]  # start and stop along each dimension
    source: int  # trainer's process; -1: several
    target: int  # engine's process; -1: all
    held: int | None  # checksum as the trainer holds it now; None: not known
    sent: int | None  # as sent by the last push
    received: int | None  # as received; None: not received

    @property
    def intact(self) -> bool:
        """Returns whether the checksums of the values held, sent and received are equal."""
        return self.held == self.sent == self.received


@dataclass(frozen=True, slots=True)
class Auxiliary:
    """A second loss in the same optimizer steps: `coef` times the mean of this loss, over its own
    rows and count, is added to the first loss.

    Its rows were not sampled from the policy, so log-probs are computed at temperature 1. Names of
    its metrics begin with `name` and "_".
    """

    name: str
    experience: Experience[Any]
    loss_fn: LossFn
    coef: float  # above 0

    def split(self, parts: int) -> "list[Auxiliary]":
        """Splits the rows into `parts` consecutive parts of nearly equal size."""
        indices = torch.arange(len(self.experience)).tensor_split(parts)
        return [replace(self, experience=self.experience.select(index)) for index in indices]
