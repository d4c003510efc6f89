"""These protocols are all that the learning half knows of the machinery. Nothing here computes.

Every method is called with the *whole* batch, on every process alike; how it is split is the
implementation's business.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from rftmega.core.ragged import Ragged
from rftmega.core.shards import Shard
from rftmega.core.types import (
    Auxiliary,
    Column,
    Completion,
    Experience,
    LossFn,
    Metrics,
    Prompt,
    Rollout,
    Rows,
    Samples,
    Sampling,
    SliceChecksums,
    TokenStats,
    Told,
    Trajectory,
)

Result = TypeVar("Result")
Enough = Callable[
    [Sequence[Rollout | None]], bool
]  # of all tasks' rollouts, None where there is none yet; the same everywhere


class Model(Protocol):
    """Model answers the requests of one rollout with the engine's present weights."""

    row_tokens: int  # context and answer together, at most
    sampling: Sampling  # the distribution that answers are drawn from

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int | None = None
    ) -> Completion:
        """Generates what follows `token_ids`, at the run's temperature, with the turn's own seed.

        Turns are counted in the order of the calls. `max_tokens`: of this answer; None: as many as
        the run allows. Raises ContextTooLong where the context leaves no room for an answer.
        """


class Environment(Protocol):
    """Environment turns a task into trajectories to learn from.

    Many runs share one engine, which generates for the others while one waits.
    """

    async def run(self, task: Prompt, model: Model) -> Sequence[Trajectory] | Rollout:
        """Runs one rollout. What it returns depends on the task and the model's answers alone.

        A Rollout, where there is more to tell than trajectories: rewards and measures of the
        environment's own. Raises InfrastructureFault where something else than the policy failed.
        """


class RolloutEngine(Protocol):
    """RolloutEngine turns tasks into rollouts, under the weights that its WeightSync brought."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        seeds: Sequence[int],
        sampling: Sampling,
        reward: "Reward | None" = None,
        enough: Enough | None = None,
        expected_lengths: Sequence[float] | None = None,
    ) -> Sequence[Rollout | None]:
        """Generates one rollout a prompt, sampled with its own seed, whatever else is in the batch;
        temperature 0 is greedy.

        With a `reward` rollouts may come back with its scores, found where and while they were
        generated. Generates until `enough` says so of what has been finished and scored; what has
        not been then is aborted, and None. Without `enough` none is None. `expected_lengths`: tokens
        that the answers to each prompt may have, for the order in which they are begun; without
        them as many as the prompt. Raises Preempted.
        """

    def answering_with(self, adapter: str) -> AbstractContextManager[None]:
        """Has engines answer with another adapter than the policy's, by its name, meanwhile."""

    def weight_sync(self, shards: Sequence[Shard], *, bucket_bytes: int) -> "WeightSync":
        """Returns what brings the trainer's shards into the engine, `bucket_bytes` at a time.

        Every process calls it.
        """

    def close(self) -> None:
        """Ends the engine; it must be gone before the process groups are."""


class RolloutGroup(NamedTuple):
    """RolloutGroup is a task whose rollouts are learnt from together, each with its seed."""

    number: int  # in the run
    prompt: Prompt
    seeds: tuple[int, ...]


class TakenGroups(NamedTuple):
    """TakenGroups holds groups that have ended, in the order in which they did."""

    groups: Sequence[RolloutGroup]
    rollouts: Sequence[Rollout | None]  # of the first group, then of the second, ...


class RolloutStream(Protocol):
    """RolloutStream rolls groups out while others are learnt from. Every process calls it alike."""

    # whether rollouts go on only while groups are waited for, so that they are the same in every run
    pauses_between_takes: bool

    def begin(
        self, groups: Sequence[RolloutGroup], *, sampling: Sampling, reward: "Reward | None"
    ) -> None:
        """Begins these, whatever else is under way."""

    @property
    def under_way(self) -> Sequence[RolloutGroup]:
        """Returns the groups that were begun, and neither taken nor dropped."""

    def take(self, most: int) -> TakenGroups:
        """Takes those `most` groups that ended first; waits for them.

        Raises Preempted where the run is asked to stop before.
        """

    def take_these(self, numbers: Sequence[int]) -> TakenGroups:
        """Takes the groups of these numbers, in this order; waits for them. Raises as `take`."""

    def join(self) -> None:
        """Waits until all that is under way has ended. Raises as `take`."""

    def drop(self, oldest: int) -> Sequence[RolloutGroup]:
        """Drops the groups that have a token of a version before `oldest`, and returns them."""

    def ended(self) -> dict[int, list[Rollout]]:
        """Returns, in the first process, the groups under way that have ended, in that order."""

    def put(self, group: RolloutGroup, rollouts: Sequence[Rollout]) -> None:
        """Puts in a group that had ended before a resume."""

    def forget(self, numbers: Sequence[int]) -> Sequence[RolloutGroup]:
        """Forgets groups, whether they have ended or not, and returns them: what the step under way
        had taken before a resume, and what another run has dropped.
        """

    def unfinished(self) -> Callable[[], dict[str, Any]]:
        """Returns what gives, in the first process, what there is now of groups that have not ended,
        for a checkpoint; {} where these begin again. It is called only if there is one.
        """

    def load_unfinished(self, state: Mapping[str, Any]) -> None:
        """Takes what `unfinished` gave before a resume, of groups that are begun again."""


class Scorer(Protocol):
    """Scorer gives log-probs of rows."""

    def log_probs(
        self, rows: Rows[Column], *, temperature: float | None = None
    ) -> TokenStats[Column]:
        """Scores every target of `rows` under the present weights; no gradient.

        `temperature` None: the rollout's. The columns are like those of `rows`, padded or Ragged.
        """

    def reference_log_probs(self, rows: Rows[Column]) -> TokenStats[Column]:
        """Scores the same under the frozen reference weights."""


class Policy(Scorer, Protocol):
    """Policy is the model that is trained."""

    def step(
        self,
        experience: Experience[Any],
        loss_fn: LossFn,
        *,
        group_size: int = 1,
        auxiliary: Auxiliary | None = None,
        scored: Told | None = None,
    ) -> Metrics:
        """Takes one optimizer step on the rows of `experience` and of `auxiliary`.

        Each `group_size` consecutive rows come before `loss_fn` together.

        The metrics have "optimizer_steps" (1, or 0 where no step was taken), "skipped_steps" (1 where
        gradients were not finite), "empty_steps" (1 where there was nothing to learn from: no weight
        moves), and counts, whose names begin with types.COUNT. An
        `experience` without old log-probs gets them from this step's forward pass: `scored` is told
        them on every process before the optimizer acts, and may raise instead.
        """


class ValueScorer(Protocol):
    """ValueScorer gives values of rows."""

    def values(self, rows: Rows[Column]) -> Column:
        """Returns the value of each state in which a target is chosen, under the present weights; no
        gradient.
        """


class ValueModel(ValueScorer, Protocol):
    """ValueModel is a critic, or a reward model, that is trained."""

    def step(self, experience: Experience[Any], loss_fn: LossFn, *, group_size: int = 1) -> Metrics:
        """Takes one optimizer step; see Policy.step."""


class WeightSync(Protocol):
    """Brings the policy's weights into the engine."""

    def push(self, *, version: int) -> Metrics: ...

    def checksums(self) -> list[SliceChecksums]:
        """Returns checksums of the last push: as the trainer holds it, as sent, as it arrived.

        Called on every process.
        """


@runtime_checkable
class LateWeights(Protocol):
    """A WeightSync that brings its last push to engines that have come since."""

    def push_to_late(self) -> int:
        """Returns how many engines have the weights now. Every process calls it, before the
        policy's weights change.
        """
        ...


class Reward(Protocol):
    """Scores answers, as many as there are; may be called from several threads at once, while
    others are still generated.

    One that compares the answers to a prompt with each other has `whole_groups = True`, and is
    asked once all are there.
    """

    def __call__(
        self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]
    ) -> list[dict[str, float]]:
        """Returns a dict a rollout: named parts before weighting, and their weighted sum under
        "reward".

        A prompt's kind decides which parts there are, so dicts of one call may differ in their
        keys.
        """


class Resumable(Protocol):
    """Something whose past the next step depends on: `state` gives it as JSON has it, but for
    tensors that nobody changes; `load_state` takes it back. It is asked for after every step, so it
    copies nothing large.
    """

    def state(self) -> Any: ...

    def load_state(self, state: Any) -> None: ...


class Host(Protocol):
    """Host keeps one copy of what is the same in all its processes."""

    def once(self, make: Callable[[], Result]) -> Result:
        """Returns what `make` gives, which is called once a host. Every process calls it.

        The result is made of tensors, numbers, Ragged columns, dicts and tuples; nobody changes it.
        """


class OneProcess:
    """OneProcess is a Host of one process, which shares nothing."""

    def once(self, make: Callable[[], Result]) -> Result:
        return make()


class Numerics(Protocol):
    """Numerics tells how exactly an engine and the trainer can agree, and lets all processes agree
    on whether they do.
    """

    dtype: str  # of the trainer's forward pass: float32 or bfloat16
    has_experts: bool
    is_main: bool  # whether this process writes files

    def agreed(self, exceeded: bool) -> bool:
        """Returns True on every process where any of them passes True; every process calls it."""


class Machinery(Protocol):
    """Machinery holds what a run with rollouts is built of."""

    numerics: Numerics
    host: Host

    engine: RolloutEngine
    weights: WeightSync
    policy: Policy
    critic: ValueModel | None
    reward_model: ValueModel | None


class Checkpoints(Protocol):
    """Keeps all that a run needs to go on: the states that it is given, and what the machinery adds
    (weights, optimizers, random streams).
    """

    def save(self, state: dict[str, Any], *, step: int) -> None:
        """Saves the run after `step` steps. May return while files are still written."""

    def wait(self) -> None:
        """Waits until the last save is on the disk."""

    def leave(self) -> None:
        """Ends what a single process still writes, where the training raises."""

    def resume(self) -> dict[str, Any] | None:
        """Loads the checkpoint that `checkpoint.resume` names.

        Returns its `state`; None: the run starts anew.
        """


class Callback(Protocol):
    """Told what the trainer does (a base with empty methods: `monitoring/observers/observer.py`).

    Callbacks see `metrics` in their order and may add to it; evaluation comes before those that
    write it down.
    """

    def on_start(self, trainer: Any, metrics: Metrics) -> None: ...

    def on_phase(self, trainer: Any, name: str, seconds: float) -> None: ...

    def on_experience(
        self, trainer: Any, samples: Samples[Ragged], experience: Experience[Ragged]
    ) -> None:
        """Receives what step `trainer.step`, just done, has learnt from.

        Called before `on_step`.
        """

    def on_step(self, trainer: Any, metrics: Metrics) -> None: ...

    def on_save(self, trainer: Any) -> None:
        """Hears that a checkpoint is about to be written: what was written of the steps before is
        to be on the disk.
        """

    def on_given_up(self, trainer: Any) -> None:
        """Hears that the training ends within a step. On all callbacks, before `on_end` on any."""

    def on_end(self, trainer: Any) -> None: ...

    def on_failed(self, trainer: Any) -> None:
        """Lets go of files, ports and threads where the training raises. Nothing follows; `on_end`
        may have come before.
        """
