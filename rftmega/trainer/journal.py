"""Journal records the results of the current step, so that a run that is stopped within a step can
resume within it.

A step requests completions, scores and optimizer steps in an order that its initial state
determines. The journal records each result. After a resume the step starts over and takes the
recorded results instead of repeating the work; the first result that is missing is where the run
was stopped.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any, TypeVar

from rftmega.core.errors import CheckpointError, Preempted
from rftmega.core.interfaces import (
    Machinery,
    RolloutEngine,
    Scorer,
    TeacherScorer,
    ValueModel,
    ValueScorer,
)
from rftmega.core.ragged import Ragged
from rftmega.core.rollout_arrays import RolloutArrays, packed_completions, unpacked_completions
from rftmega.core.teacher_scores import TeacherRequest, TeacherScores
from rftmega.core.types import (
    Column,
    Completion,
    Prompt,
    Rollout,
    Rows,
    TokenStats,
    TokenValues,
    Trajectory,
)

Result = TypeVar("Result")
Completions = Sequence[Rollout | None]
SO_FAR = " so far"  # suffix for partial completions: the rollout was interrupted


class Journal:
    """Journal is the record of the results of a step (completions, scores, optimizer steps), used
    to resume within the step. Calling it with a name and a function records the function's result;
    its length is the number of recorded results.
    """

    def __init__(self, stop: Callable[[], bool] = lambda: False):
        """`stop` is called after each recorded result, on every process, and must return the same
        value on all processes: True if the run shall stop.
        """
        self.stop = stop
        self._done: list[tuple[str, Any]] = []
        self._before: deque[tuple[str, Any]] = deque()  # of a stopped run, not yet replayed

    def __len__(self) -> int:
        return len(self._done)

    @property
    def behind(self) -> bool:
        """Returns whether results recorded before the resume are still to be replayed, so that the
        next work of the step was already done or started.
        """
        return bool(self._before)

    def begin(self) -> None:
        """Starts the record of a new step.

        Raises CheckpointError if the previous step has not used all results from before the resume.
        """
        if self._done and self._before:
            raise _otherwise(self._before[0][0], "the end of the step")
        self._done = []

    def __call__(self, name: str, work: Callable[[], Result]) -> Result:
        """Returns the result of `work`, or the result recorded under `name` before the resume.

        Raises Preempted if the run is asked to stop; CheckpointError if the next recorded result
        has another name.
        """
        if self._before:
            return self.replay(name)  # type: ignore[no-any-return]
        result = work()
        self.record(name, result)
        return result

    def replay(self, name: str) -> Any:
        """Returns the next result from before the resume, and records it again for this run's
        checkpoints.

        Raises CheckpointError if the result was recorded under another name.
        """
        known, result = self._before.popleft()
        if known != name:
            raise _otherwise(known, name)
        self._done.append((name, result))
        return result

    def record(self, name: str, result: Any) -> None:
        """Records a result. Then raises Preempted if the run is asked to stop."""
        self.keep(name, result)
        if self.stop():
            raise Preempted

    def keep(self, name: str, result: Any) -> None:
        """Records a result without stopping the run, for work that must continue immediately;
        `result` may be a function, which is called only if a checkpoint is written.
        """
        self._done.append((name, result))

    def completions(
        self, name: str, requests: int, ask: Callable[[Sequence[int]], Completions]
    ) -> Sequence[Any]:
        """Returns the completions of `requests` requests (their number), recorded under `name`;
        completions from before a resume are not requested again.

        `ask` is called with the indices of the requests without a completion, and may raise
        Preempted with some of their completions.
        """
        known: Sequence[Any] = [None] * requests
        if self._before and self._before[0][0] == name + SO_FAR:
            known = self._before.popleft()[1]
        left = [place for place, answer in enumerate(known) if answer is None]

        def with_those(found: Completions) -> Sequence[Any]:
            if len(left) == requests:
                return found
            new = dict(zip(left, found, strict=True))
            return [new.get(place, answer) for place, answer in enumerate(known)]

        def work() -> Sequence[Any]:
            try:
                return with_those(ask(left))
            except Preempted as given_up:
                if any(completions := with_those(given_up.completions or [None] * len(left))):
                    self._done.append((name + SO_FAR, completions))
                raise

        return self(name, work)

    def mend(self, prompts: Sequence[Prompt]) -> None:
        """Converts the next recorded completions into rollouts of `prompts`, for checkpoints before
        format 4, which store completions instead of rollouts.
        """
        if self._before and isinstance(self._before[0][1], list):  # of completions
            name, completions = self._before.popleft()
            if len(completions) == len(prompts):
                pairs = zip(prompts, completions, strict=True)
                completions = [_of_rollout(prompt, answer) for prompt, answer in pairs]
            self._before.appendleft((name, completions))

    def state(self) -> list[list[Any]]:
        """Returns the recorded results of the step as JSON lists [name, result], except for
        tensors.
        """
        return [[name, _packed(result)] for name, result in self._done]

    def load_state(self, state: Sequence[Sequence[Any]]) -> None:
        self._done, self._before = [], deque((name, _unpacked(packed)) for name, packed in state)


class JournaledEngine:
    """JournaledEngine is an engine that takes rollouts from before a resume from the journal, the
    record of the step's results. Rollouts that were complete when the run was stopped are not
    requested again, unless `enough` is given, whose result depends on the order of arrival.
    """

    def __init__(self, engine: RolloutEngine, journal: Journal):
        self.engine, self.journal = engine, journal
        self.weight_sync, self.close = engine.weight_sync, engine.close

    def answering_with(self, adapter: str) -> AbstractContextManager[None]:
        """Makes the engine generate with the adapter named `adapter` within the context; see
        RolloutEngine.answering_with.
        """
        return self.engine.answering_with(adapter)

    def generate(
        self, prompts: Sequence[Prompt], *, seeds: Sequence[int], **asked: Any
    ) -> Sequence[Rollout | None]:
        """Returns rollouts from the journal, and calls RolloutEngine.generate for the rollouts that
        the journal lacks.
        """

        def ask(places: Sequence[int]) -> Sequence[Rollout | None]:
            left, own = [prompts[place] for place in places], [seeds[place] for place in places]
            given = dict(asked)
            if (lengths := given.get("expected_lengths")) is not None:
                given["expected_lengths"] = [lengths[place] for place in places]
            return self.engine.generate(left, seeds=own, **given)

        self.journal.mend(prompts)
        if asked.get("enough") is not None:
            every = range(len(prompts))
            return self.journal(f"enough of {len(prompts)} answers", lambda: ask(every))
        return self.journal.completions(f"{len(prompts)} answers", len(prompts), ask)


class JournaledPolicy:
    """JournaledPolicy computes log-probs, or takes those from before a resume from the journal, the
    record of the step's results (`optimizer_steps.take_steps` replays optimizer steps). Log-probs
    in a checkpoint before format 5 are padded.
    """

    def __init__(self, policy: Scorer, journal: Journal):
        self.policy, self.journal = policy, journal

    def log_probs(
        self, rows: Rows[Column], *, temperature: float | None = None
    ) -> TokenStats[Column]:
        found = self.journal(
            f"log-probs of {len(rows)} rows",
            lambda: self.policy.log_probs(rows, temperature=temperature),
        )
        return rows.like(found)  # type: ignore[no-any-return]

    def reference_log_probs(self, rows: Rows[Column]) -> TokenStats[Column]:
        found = self.journal(
            f"reference log-probs of {len(rows)} rows",
            lambda: self.policy.reference_log_probs(rows),
        )
        return rows.like(found)  # type: ignore[no-any-return]


class JournaledTeacher:
    """JournaledTeacher is a teacher whose numbers of likeliest and sampled tokens come from the
    journal after a resume: the policy as its own teacher has other weights by then. Hidden states
    are large, and those of another model do not change; they are computed again.
    """

    def __init__(self, teacher: TeacherScorer, journal: Journal, number: int):
        """`number`: of the teacher among those of the run."""
        self.teacher, self.journal, self.number = teacher, journal, number

    def teach(self, rows: Rows[Any], request: TeacherRequest) -> TeacherScores:
        if request.vocabulary == "full":
            return self.teacher.teach(rows, request)
        return self.journal(
            f"numbers of teacher {self.number} for {len(rows)} rows",
            lambda: self.teacher.teach(rows, request),
        )


class JournaledValues:
    """JournaledValues computes the values of a value model, or takes those from before a resume
    from the journal, the record of the step's results; `name`: the model's name in the journal.
    """

    def __init__(self, model: ValueScorer, journal: Journal, name: str):
        self.model, self.journal, self.name = model, journal, name

    def values(self, rows: Rows[Column]) -> Column:
        found = self.journal(
            f"values of {len(rows)} rows by the {self.name}", lambda: self.model.values(rows)
        )
        return rows.like(TokenValues(found)).value  # type: ignore[no-any-return]


class Journaled:
    """Journaled is the Machinery of a run (engine, weight sync and models) whose completions and
    scores are recorded in a journal, so that the run can resume within a step; weight syncs can be
    repeated and are not recorded.
    """

    def __init__(self, built: Machinery, journal: Journal):
        def values(model: ValueModel | None, name: str) -> ValueScorer | None:
            return None if model is None else JournaledValues(model, journal, name)

        self.engine: RolloutEngine = JournaledEngine(built.engine, journal)
        self.weights = built.weights
        self._built, self._journal = built, journal
        self.policy: Scorer = JournaledPolicy(built.policy, journal)
        self.critic = values(built.critic, "critic")
        self.scoring_models: dict[str, ValueScorer] = {
            name: JournaledValues(model, journal, name.replace("_", " "))
            for name, model in built.scoring_models.items()
        }

    @property
    def teachers(self) -> list[JournaledTeacher]:
        numbered = enumerate(self._built.teachers, start=1)
        return [JournaledTeacher(each, self._journal, number) for number, each in numbered]


def _otherwise(known: str, now: str) -> CheckpointError:
    return CheckpointError(
        f"The run was stopped within a step, after {known}, where this run comes to {now}. Go on with the options that it was "
        "stopped with, or from the checkpoint before."
    )


def _packed(result: Any) -> Any:
    if callable(result):
        return result()
    if isinstance(result, TokenStats):
        columns = {each.name: getattr(result, each.name) for each in fields(result)}
        return {name: _packed(column) for name, column in columns.items() if column is not None}
    if isinstance(result, TeacherScores):
        columns = {name: _packed(column) for name, column in result.columns().items()}
        return {"taught": result.taught, **columns}
    if isinstance(result, Ragged):
        return {"values": result.flat, "lengths": result.lengths}
    return packed_completions(result) if isinstance(result, list | RolloutArrays) else result


def _unpacked(packed: Any) -> Any:
    if not isinstance(packed, dict):
        return packed
    if "taught" in packed:
        return TeacherScores(**{name: _unpacked(column) for name, column in packed.items()})
    if "logp" in packed:
        columns = {name: _unpacked(column) for name, column in packed.items()}
        return TokenStats(**{"entropy": None} | columns)
    if "lengths" in packed:
        return Ragged.packed(packed["values"], packed["lengths"])
    if "token_ids" not in packed:
        return packed
    return _completions_of_format_3(packed) if "answers" in packed else unpacked_completions(packed)


def _of_rollout(prompt: Prompt, answer: Any) -> Rollout | None:
    """Returns the rollout of a recorded completion; checkpoints before format 4 store only the
    completion and its scores.
    """
    if answer is None or isinstance(answer, Rollout):
        return answer
    completion, scores = answer
    return Rollout((Trajectory.of(prompt.token_ids, completion),), scores)


def _completions_of_format_3(packed: dict[str, Any]) -> list[tuple[Completion, Any] | None]:
    sizes = [said[0] for said in packed["answers"] if said is not None]
    tokens, logprobs = (iter(packed[name].split(sizes)) for name in ("token_ids", "logprobs"))
    routes = iter(packed["routes"])
    found: list[tuple[Completion, Any] | None] = []
    for said in packed["answers"]:
        if said is None:
            found.append(None)
        else:
            _, reason, version, scores, versions = said
            ids, logp = tuple(next(tokens).tolist()), tuple(next(logprobs).tolist())
            completion = Completion(ids, logp, reason, version, tuple(versions), next(routes))
            found.append((completion, scores))
    return found
