"""Protocols between the algorithms and trainer on one side and engines, models and checkpoints on
the other side. The protocols compute nothing.

Every method is called with the *whole* batch on every process; the implementation decides how to
split the batch.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from rftmega.core.ragged import Ragged
from rftmega.core.shards import Shard
from rftmega.core.teacher_scores import TeacherRequest, TeacherScores
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
]  # given all tasks' rollouts, None for unfinished ones; the same on every process


class Model(Protocol):
    """Model generates completions for one rollout with the engine's current weights."""

    row_tokens: int  # maximum of context and completion together
    sampling: Sampling  # the distribution that completions are drawn from

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int | None = None
    ) -> Completion:
        """Generates a completion of the context `token_ids`, at the run's temperature, with a
        separate seed per turn.

        Turns are counted in the order of the calls. `max_tokens`: maximum length of this
        completion; None: the run's maximum. Raises ContextTooLong if the context leaves no room for
        a completion.
        """


class Environment(Protocol):
    """Environment runs a task and returns trajectories to train on.

    Many rollouts share one engine; while one rollout waits, the engine generates for the other
    rollouts.
    """

    async def run(self, task: Prompt, model: Model) -> Sequence[Trajectory] | Rollout:
        """Runs one rollout; its result must depend only on the task and the model's completions.

        Returns a Rollout instead of trajectories to pass the environment's own rewards and
        measures. Raises InfrastructureFault if something other than the policy failed.
        """


class RolloutEngine(Protocol):
    """RolloutEngine generates rollouts for tasks with the weights of the most recent weight sync."""

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
        """Generates one rollout per prompt, each sampled with its own seed and independent of the
        other prompts in the batch; temperature 0 is greedy.

        With a `reward`, rollouts may be scored while other rollouts are still generated. Generation
        continues until `enough` returns True for the finished and scored rollouts; unfinished
        rollouts are then aborted and returned as None. Without `enough` every rollout is finished.
        `expected_lengths`: expected completion tokens of each prompt, which decide the order in
        which requests start; None: the prompts' lengths are used. Raises Preempted if the run is
        asked to stop.
        """

    def answering_with(self, adapter: str) -> AbstractContextManager[None]:
        """Makes the engines generate with the adapter named `adapter` instead of the policy's
        within the context.
        """

    def weight_sync(self, shards: Sequence[Shard], *, bucket_bytes: int) -> "WeightSync":
        """Returns the WeightSync that moves the trainer's shards into the engine, in buckets of
        `bucket_bytes`.

        Called on every process.
        """

    def close(self) -> None:
        """Shuts the engine down; call it before the process groups are destroyed."""


class RolloutGroup(NamedTuple):
    """RolloutGroup is a prompt (task) and the sampling seeds of its rollouts, which are trained on
    together.
    """

    number: int  # in the run
    prompt: Prompt
    seeds: tuple[int, ...]


class TakenGroups(NamedTuple):
    """TakenGroups holds finished groups and their rollouts, in the order in which the groups
    finished.
    """

    groups: Sequence[RolloutGroup]
    rollouts: Sequence[Rollout | None]  # of the first group, then of the second, ...


class RolloutStream(Protocol):
    """RolloutStream generates groups of rollouts while earlier groups are trained on (asynchronous
    training). Its methods are called on every process.
    """

    # whether generation continues only while a take waits, which makes rollouts reproducible
    pauses_between_takes: bool

    def begin(
        self, groups: Sequence[RolloutGroup], *, sampling: Sampling, reward: "Reward | None"
    ) -> None:
        """Starts the rollouts of these groups, in addition to the groups in progress."""

    @property
    def under_way(self) -> Sequence[RolloutGroup]:
        """Returns the groups in progress: begun, but neither taken nor dropped."""

    def take(self, most: int) -> TakenGroups:
        """Waits until `most` groups have finished, and returns the `most` groups that finished
        first, in this order.

        Raises Preempted if the run is asked to stop during the wait.
        """

    def take_these(self, numbers: Sequence[int]) -> TakenGroups:
        """Waits for the groups with these numbers and returns them in this order. Raises Preempted
        if the run is asked to stop during the wait.
        """

    def join(self) -> None:
        """Waits until all groups in progress have finished. Raises Preempted if the run is asked to
        stop during the wait.
        """

    def drop(self, oldest: int) -> Sequence[RolloutGroup]:
        """Removes and returns the groups that have a token from a policy version before `oldest`."""

    def ended(self) -> dict[int, list[Rollout]]:
        """Returns, on the first process, the finished groups that were not taken yet, as group
        number -> rollouts, in the order of finishing.
        """

    def put(self, group: RolloutGroup, rollouts: Sequence[Rollout]) -> None:
        """Adds a group whose rollouts had finished before the run was resumed."""

    def forget(self, numbers: Sequence[int]) -> Sequence[RolloutGroup]:
        """Removes and returns the groups with these numbers, finished or not: after a resume,
        groups that the interrupted step had already taken; in a replay of another run's order,
        groups that the other run has dropped.
        """

    def unfinished(self) -> Callable[[], dict[str, Any]]:
        """Returns a function that collects, on the first process, the state of unfinished groups
        for a checkpoint; {} if these groups start over after a resume. The caller calls the
        function only when it writes a checkpoint.
        """

    def load_unfinished(self, state: Mapping[str, Any]) -> None:
        """Restores the state returned by `unfinished`, for groups that are then begun again."""


class Scorer(Protocol):
    """Scorer computes log-probs of token rows."""

    def log_probs(
        self, rows: Rows[Column], *, temperature: float | None = None
    ) -> TokenStats[Column]:
        """Returns the log-prob of every target of `rows` under the current weights, without
        gradient.

        `temperature` None: the temperature of the rollout. The result's columns are padded or
        Ragged, as in `rows`.
        """

    def reference_log_probs(self, rows: Rows[Column]) -> TokenStats[Column]:
        """Returns the log-prob of every target of `rows` under the frozen reference weights."""


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
        """Takes one optimizer step on the rows of `experience` and of `auxiliary`, a second loss
        with its own rows.

        Every `group_size` consecutive rows are passed to `loss_fn` together. The metrics contain
        "optimizer_steps" (1, or 0 if no step was taken), "skipped_steps" (1 if gradients were not
        finite), "empty_steps" (1 if there was nothing to train on: no weight changes), and counts,
        whose names begin with types.COUNT. If `experience` has no old log-probs, this step's
        forward pass computes them: `scored` receives them on every process before the optimizer
        step, and may raise to prevent it.
        """


class TeacherScorer(Protocol):
    """TeacherScorer is a model that teaches the policy."""

    def teach(self, rows: Rows[Any], request: TeacherRequest) -> TeacherScores:
        """Returns the requested numbers of the tokens that the mask of `rows` marks, on the host,
        without gradient. All rows are taught.
        """


class ValueScorer(Protocol):
    """ValueScorer computes state values of rows."""

    def values(self, rows: Rows[Column]) -> Column:
        """Returns, for each target of `rows`, the value of the state in which the target is chosen
        (the tokens before it), under the current weights, without gradient.
        """


class ValueModel(ValueScorer, Protocol):
    """ValueModel is a trained critic or reward model."""

    def step(self, experience: Experience[Any], loss_fn: LossFn, *, group_size: int = 1) -> Metrics:
        """Takes one optimizer step on the rows of `experience`; `group_size` and metrics are those
        of Policy.step.
        """


class WeightSync(Protocol):
    """WeightSync moves the policy's weights into the engine (a push); `version` is the policy
    version of the weights.
    """

    def push(self, *, version: int) -> Metrics: ...

    def checksums(self) -> list[SliceChecksums]:
        """Returns the checksums of each weight slice of the last push: of the values that the
        trainer holds, that were sent, and that were received.

        Called on every process.
        """


@runtime_checkable
class LateWeights(Protocol):
    """A WeightSync that can send its last push again, to engines that have joined after it."""

    def push_to_late(self) -> int:
        """Sends the last push to engines that joined after it. Returns the number of engines that
        have the weights now. Called on every process, before the policy's weights change.
        """
        ...


class Reward(Protocol):
    """Reward scores any number of completions; it may be called from several threads at once, while
    other completions are still being generated.

    A reward that compares the completions of a prompt has `whole_groups = True` and is called once
    all completions of the prompt are finished.
    """

    def __call__(
        self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]
    ) -> list[dict[str, float]]:
        """Returns one dict per rollout: named components before weighting, and their weighted sum
        under "reward".

        A prompt's task type decides its components, so dicts of one call may differ in their keys.
        """


class Resumable(Protocol):
    """An object whose state the next step depends on.

    `state` returns the state as JSON, with tensors that are never modified; `load_state` restores
    it. `state` is called after every step, so it must not copy large data.
    """

    def state(self) -> Any: ...

    def load_state(self, state: Any) -> None: ...


class Host(Protocol):
    """Host keeps one copy of data that all processes of a host (machine) share."""

    def once(self, make: Callable[[], Result]) -> Result:
        """Returns the result of `make`, which is called by one process per host; the other
        processes of the host get the same data. All processes must call `once`.

        The result consists of tensors, numbers, Ragged columns, dicts and tuples; callers must not
        modify it.
        """


class OneProcess:
    """OneProcess is the Host of a run with a single process: `once` calls the function and shares
    nothing.
    """

    def once(self, make: Callable[[], Result]) -> Result:
        return make()


class Numerics(Protocol):
    """Numerics describes how closely the log-probs of engine and trainer can agree, and makes all
    processes reach the same verdict on a mismatch.
    """

    dtype: str  # of the trainer's forward pass: float32 or bfloat16
    has_experts: bool
    is_main: bool  # whether this process writes files

    def agreed(self, exceeded: bool) -> bool:
        """Returns whether any process passes True as `exceeded`; every process calls it and gets
        the same result.
        """


class Machinery(Protocol):
    """Machinery holds the components of an RL run, built for its backend and engine: rollout
    engine, weight sync, policy, optional critic, and the reward and cost models by name.
    """

    numerics: Numerics
    host: Host

    engine: RolloutEngine
    weights: WeightSync
    policy: Policy
    critic: ValueModel | None
    scoring_models: Mapping[str, ValueModel]
    teachers: Sequence[TeacherScorer]  # of algorithm.teachers


class Checkpoints(Protocol):
    """Checkpoints saves and loads everything needed to resume a run: the given state, weights,
    optimizers and random states.
    """

    def save(self, state: dict[str, Any], *, step: int) -> None:
        """Saves the run after `step` steps; may return while files are still being written."""

    def wait(self) -> None:
        """Waits until the last checkpoint is on disk."""

    def leave(self) -> None:
        """Stops writing checkpoints on this process without waiting for other processes; called
        when training raises an error.
        """

    def resume(self) -> dict[str, Any] | None:
        """Loads the checkpoint that the option `checkpoint.resume` names: weights, optimizers and
        random states.

        Returns the state that `save` was given; None if the run starts from scratch.
        """


class Callback(Protocol):
    """Callback is notified of the trainer's events (base class with empty methods:
    `monitoring/observers/observer.py`).

    The trainer passes the same `metrics` to all callbacks, in their order; each may add entries.
    Evaluation comes before the callbacks that log.
    """

    def on_start(self, trainer: Any, metrics: Metrics) -> None: ...

    def on_phase(self, trainer: Any, name: str, seconds: float) -> None: ...

    def on_rollouts(self, trainer: Any, samples: Samples[Ragged]) -> None:
        """Receives the scored samples of a step before they are trained on. `trainer.step` is the
        number of finished steps.
        """

    def on_experience(
        self, trainer: Any, samples: Samples[Ragged], experience: Experience[Ragged]
    ) -> None:
        """Receives the scored samples and the experience on which the step just finished, number
        `trainer.step`, has trained.

        Called before `on_step`.
        """

    def on_step(self, trainer: Any, metrics: Metrics) -> None: ...

    def on_save(self, trainer: Any) -> None:
        """Called before a checkpoint is written; the callback must flush its output of earlier
        steps to disk.
        """

    def on_given_up(self, trainer: Any) -> None:
        """Called if training ends before a step is complete: on all callbacks, before any `on_end`."""

    def on_end(self, trainer: Any) -> None: ...

    def on_failed(self, trainer: Any) -> None:
        """Releases files, ports and threads if training raises an error. No other method is called
        afterwards; `on_end` may have been called before.
        """
