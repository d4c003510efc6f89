"""The environment of tools over several engines: the rollouts of one engine that is asked one
request at a time, also where a tool dies, an engine breaks down or the run is stopped on the way.
"""

import hashlib
import os
import pickle
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rftmega.config import RolloutConfig
from rftmega.config.options.environments import Tools
from rftmega.core.errors import EngineFault, Preempted
from rftmega.core.types import Completion, Prompt, Rollout, Sampling
from rftmega.data.tokenizer import Chat, Tokenizer
from rftmega.environments.create import specs_of
from rftmega.environments.tool_environment import ToolsEnvironment
from rftmega.rollout.engines import ScriptedEngine
from rftmega.rollout.pool.engine_pool import EnginePool
from rftmega.rollout.requests import Request
from rftmega.runtime.parallel import preemption
from rftmega.runtime.parallel.process_group import World
from rftmega.trainer.journal import Journal, JournaledEngine
from tests.calling_model import END, HEAD, TAIL, WRONG, save_calling
from tests.distributed.test_early_stop import NoTurns
from tests.distributed.test_engine_faults import Pushes
from tests.ranks import run_ranks
from tests.rollouts import Wrapped

SOURCE = '''
import os
import time
from pathlib import Path

from rftmega.core.errors import InfrastructureFault


class Adder:
    """Adds, and counts what it was asked. Dies twice in every third rollout where DYING says so."""

    def begin(self, task):
        self.index, self.sum = task.index, 0

    def add(self, a: int) -> str:
        """Adds to what was added before.

        Args:
            a: A number.
        """
        time.sleep(0.002 * (a % 3))
        if self.sum and DYING and self.index % 3 == 0:
            self._die()
        if a % 7 == 0:
            raise ValueError("no sevens")
        self.sum += a
        return str(self.sum)

    def _die(self):
        for attempt in range(2):
            mark = Path(__file__).with_name(f"died-{self.index}-{attempt}")
            if not mark.exists():
                mark.touch()
                raise InfrastructureFault("the adder is gone")

    def turn_reward(self):
        return 0.25 if self.sum % 2 else None

    def rewards(self):
        return {"sum": float(self.sum)}
'''
TASKS = 24
SEEDS = [3000 + place for place in range(TASKS)]
OPTIONS: dict[str, Any] = {"max_turns": 5, "max_turn_tokens": 30, "max_tokens": 100}
ASKED_AT = 4  # rollouts that have their scores


class Folder:
    """A folder with a model that calls tools, and the tool."""

    def __init__(self, path: Path, *, dying: bool = False):
        path.mkdir(parents=True, exist_ok=True)
        self.model, self.tool = path / "model", path / "adder.py"
        if not self.model.exists():
            save_calling(self.model)
            self.tool.write_text(f"DYING = {dying}\n{SOURCE}")
        self.options = Tools(tools=[f"{self.tool}:Adder"], **OPTIONS)
        self.tokenizer = Tokenizer(self.model, chat=Chat(tools=specs_of(self.options)))

    def environment(self) -> ToolsEnvironment:
        return ToolsEnvironment(self.options, self.tokenizer)

    def tasks(self, number: int = TASKS) -> list[Prompt]:
        found = []
        for place in range(number):
            words = f"{place}+{place % 5}?"
            ids = self.tokenizer.encode(words, chat_template=True)
            found.append(Prompt(ids, index=place, record=f'{{"prompt": "{words}"}}'))
        return found


class Talks(ScriptedEngine):
    """Says what it draws by the whole context and the seed: calls, of which some are wrong, two at
    once or broken off, and answers. In step `breaks` it breaks down. With so many `signalled`
    rollouts that have their scores the process gets a signal.
    """

    def __init__(self, tokenizer: Tokenizer, rank: int = 0, breaks: int = 0, signalled: int = 0):
        config = RolloutConfig(max_prompt_tokens=1024, max_response_tokens=1024, max_batch=3)
        super().__init__(config, vocabulary=50, stop_ids=tokenizer.stop_ids)
        self.tokenizer, self.pace = tokenizer, random.Random(rank)
        self.breaks, self.signalled = breaks, signalled
        self.asked: list[tuple[tuple[int, ...], int]] = []

    def _cut(self, request: Request) -> Completion:
        self.asked.append((tuple(request.token_ids), request.seed))
        known = hashlib.sha256(repr((tuple(request.token_ids), request.seed)).encode())
        drawn = random.Random(known.digest())
        call = f"<tool_call>{HEAD}{drawn.randrange(1, 99)}{TAIL}</tool_call>"
        wrong = f"<tool_call>{WRONG}1{TAIL}</tool_call>"
        broken = f"<tool_call>{HEAD}1"
        said = drawn.choice([call, call, call + call, call + call, wrong, broken, "12", "7" * 40])
        ids = self.tokenizer.encode_reply(said + END)
        most = request.limit(len(ids))
        logprobs = [-drawn.random() for _ in ids]
        reason: Any = "stop" if most == len(ids) else "length"
        return Completion(ids[:most], logprobs[:most], reason, self.version or 0)

    def _serve(self, requests: Any, sampling: Sampling) -> None:
        def stepped() -> bool:
            time.sleep(0.0005 * self.pace.random())
            if self.steps == self.breaks:
                raise EngineFault("out of pages")
            if self.signalled and len(requests.judging.answered) >= self.signalled:
                requests.judging.settled(lambda: False)
                os.kill(os.getpid(), signal.SIGUSR1)
                self.signalled = 0
            return bool(requests.stopped())

        super()._serve(Wrapped(requests, stopped=stepped), sampling)


def scores(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
    return [{"reward": float(sum(rollout.response_ids))} for rollout in rollouts]


def told(rollout: Rollout, *, repeats: bool = True) -> Any:
    """All of a rollout but times; without `repeats`, nor how often it was run again."""
    timed = {"tool_seconds"} | (set() if repeats else {"repeats"})
    measures = {name: value for name, value in rollout.measures.items() if name not in timed}
    return replace(rollout, measures=measures)


def pooled(world: World, engine: Talks, folder: Folder, per_engine: int, **more: Any) -> EnginePool:
    weights = Pushes(engine)
    weights.push(version=7)
    pool = EnginePool(
        engine,
        NoTurns({}, offload=False),
        world,
        folder.environment(),
        processes_per_engine=per_engine,
        restarts=1,
        **more,
    )
    pool.weights = weights
    return pool


def asked_of(engine: Any, tasks: Sequence[Prompt], seeds: Sequence[int] = SEEDS) -> list[Rollout]:
    found = engine.generate(tasks, seeds=seeds, sampling=Sampling(1.0), reward=scores)
    return list(found)


def scripted_body(world: World, path: Path, per_engine: int, breaks: int) -> Any:
    folder = Folder(path)
    number, place = divmod(world.rank, per_engine)
    # the first process of the engine some steps after the other
    step = breaks + 3 * (place == 0) if breaks and number == 0 else 0
    engine = Talks(folder.tokenizer, world.rank, step)
    pool = pooled(world, engine, folder, per_engine, repeats=2)
    try:
        return asked_of(pool, folder.tasks()), len(engine.asked)
    finally:
        pool.close()


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Rollout]]:
    """A folder, and its rollouts in process."""
    path = tmp_path_factory.mktemp("scripted")
    Folder(path)
    ((rollouts, _),) = run_ranks(1, scripted_body, path, 1, 0)
    return path, rollouts


def test_the_rollouts_of_these_tests_have_all_that_can_happen(
    scripted: tuple[Path, list[Rollout]],
) -> None:
    _, rollouts = scripted
    counted = {name: [one.measures[name] for one in rollouts] for name in rollouts[0].measures}
    assert {1.0, 2.0, 3.0, 5.0} <= set(counted["turns"])
    several = zip(counted["tool_calls"], counted["turns"], strict=True)
    assert any(calls > turns for calls, turns in several), "no two calls in one answer"
    for name in ("tool_errors", "over_turns", "over_tokens"):
        assert 0 < sum(map(bool, counted[name])) < TASKS, name
    assert any(one.rewards["sum"] for one in rollouts)
    assert any(turn.reward for one in rollouts for turn in one.trajectories[0].turns)
    for one in rollouts:
        (trajectory,) = one.trajectories
        said = sum(turn.stop - turn.start for turn in trajectory.turns if turn.role == "assistant")
        assert said == trajectory.loss_mask.sum() > 0


@pytest.mark.parametrize(
    ("world", "per_engine", "breaks"),
    [
        (2, 2, 0),
        *(
            pytest.param(world, per_engine, breaks, marks=pytest.mark.ranks)
            for world, per_engine in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4))
            for breaks in (0, 9)
            if (world, per_engine, breaks) != (2, 2, 0)
        ),
    ],
)
def test_rollouts_with_tools_are_the_same_whichever_engine_has_them(
    world: int, per_engine: int, breaks: int, scripted: tuple[Path, list[Rollout]]
) -> None:
    path, wanted = scripted
    for rollouts, _ in run_ranks(world, scripted_body, path, per_engine, breaks, timeout=120):
        assert [told(one) for one in rollouts] == [told(one) for one in wanted]


@pytest.mark.parametrize(
    ("world", "per_engine"),
    [(1, 1), pytest.param(4, 2, marks=pytest.mark.ranks)],
)
def test_a_tool_that_dies_twice_changes_no_rollout(
    world: int, per_engine: int, tmp_path: Path, scripted: tuple[Path, list[Rollout]]
) -> None:
    Folder(tmp_path, dying=True)
    results = run_ranks(world, scripted_body, tmp_path, per_engine, 0, timeout=120)
    died = {int(mark.name.split("-")[1]) for mark in tmp_path.glob("died-*-1")}
    assert died, "no tool died"
    for rollouts, _ in results:
        assert [told(one, repeats=False) for one in rollouts] == [told(one) for one in scripted[1]]
        again = {place for place, one in enumerate(rollouts) if one.measures.get("repeats") == 2}
        assert again == died


def resumed_body(world: World, path: Path, per_engine: int) -> Any:
    """Each process that comes so far gets a signal; another run goes on from the journal."""
    folder = Folder(path)
    preemption.LOOK = 0.02
    preemption.meet(dist.FileStore(str(path / f"board-{world.size}-{per_engine}"), world.size))
    engine = Talks(folder.tokenizer, world.rank, signalled=ASKED_AT)
    pool = pooled(world, engine, folder, per_engine)
    stopped = Journal()
    with preemption.listening(), pytest.raises(Preempted):
        asked_of(JournaledEngine(pool, stopped), folder.tasks())
    pool.close()
    preemption.request.came = 0
    preemption.meet(None)
    kept = pickle.dumps(stopped.state())
    ((_, there),) = stopped._done

    journal = Journal()
    journal.load_state(pickle.loads(kept))
    engine = Talks(folder.tokenizer, world.rank)
    pool = pooled(world, engine, folder, per_engine)
    found = asked_of(JournaledEngine(pool, journal), folder.tasks())
    pool.close()
    return list(there), found, [(len(ids), seed) for ids, seed in engine.asked]


@pytest.mark.parametrize(
    ("world", "per_engine"),
    [
        (1, 1),
        pytest.param(2, 1, marks=pytest.mark.ranks),
        pytest.param(2, 2, marks=pytest.mark.ranks),
    ],
)
def test_a_resumed_phase_takes_what_was_finished_and_begins_the_others_anew(
    world: int, per_engine: int, scripted: tuple[Path, list[Rollout]]
) -> None:
    path, wanted = scripted
    results = run_ranks(world, resumed_body, path, per_engine, timeout=120)
    tasks = Folder(path).tasks()
    for there, found, _ in results:
        assert 0 < sum(one is not None for one in there) < TASKS
        # to the last bit, and with the seconds that tools took before the stop
        assert [each for each, one in zip(found, there, strict=True) if one is not None] == [
            one for one in there if one is not None
        ]
        assert [told(one) for one in found] == [told(one) for one in wanted]
    there = results[0][0]
    begun = [asked for *_, own in results[::per_engine] for asked in own]
    for place, one in enumerate(there):
        first = (len(tasks[place].token_ids), SEEDS[place])
        assert begun.count(first) == (one is None), "begun anew though it was there, or not at all"
