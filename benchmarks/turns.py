"""Measures how long engines are idle while rollouts wait for tools, and the overhead of the tools
environment over a plain loop with the same engine.
"""

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.timing import compare
from rftmega.config import ParallelConfig, RolloutConfig
from rftmega.config.options.environments import Tools
from rftmega.core.sampling_seeds import turn_seed
from rftmega.core.types import Completion, Prompt, Rollout, Sampling
from rftmega.data.tokenizer import Chat, Tokenizer
from rftmega.environments.create import specs_of
from rftmega.environments.tool_environment import ToolsEnvironment
from rftmega.rollout.engines import ScriptedEngine
from rftmega.rollout.pool.engine_pool import EnginePool
from rftmega.rollout.pool.pending_requests import PendingRequests, Tasks
from rftmega.rollout.pool.request_queues import Counted
from rftmega.rollout.requests import Request, Requests
from rftmega.rollout.requests.order import ordered
from rftmega.rollout.requests.partial_completion import PartialCompletion
from rftmega.run.placement.phases import DevicePhases
from rftmega.runtime.parallel.process_group import World
from tests.calling_model import END, HEAD, TAIL, save_calling, talkative
from tests.layouts import build_manager
from tests.ranks import run_ranks
from tests.rollouts import Wrapped

# seconds per step of the scripted engine: about those of an 8B model on a GPU; and so many
# that the cost of a turn in this process is small in comparison
STEPS = (0.02, 0.2)
UNDER_WAY, TASKS, TURNS = 1000, 2000, 4
COMPLETION = 20  # mean tokens of a completion; a tool takes half as many steps
SIZE = 64  # rollouts
ROUNDS = {1: 11, 94: 11, 394: 3}  # of a comparison, by words per completion
CALL = re.compile("<tool_call>(.*?)</tool_call>", re.DOTALL)
PLACES = (1, 2, 4)  # concurrent rollouts per slot of the engine
FUNCTION = '''
import asyncio

async def add(a: int) -> int:
    """Adds three.

    Args:
        a: A number.
    """
    await asyncio.sleep({seconds})
    return a + 3
'''


def tokenizer_and_tools(folder: Path, model: Path, seconds: float) -> tuple[Tokenizer, Tools]:
    """Returns the tokenizer of a folder, and the options of a tool that takes so many seconds."""
    file = folder / "my_tools.py"
    file.write_text(FUNCTION.format(seconds=seconds))
    options = Tools(tools=[f"{file}:add"], max_turns=TURNS)
    return Tokenizer(model, chat=Chat(tools=specs_of(options))), options


class Calls(ScriptedEngine):
    """Calls is an engine that calls the tool in every completion, of about COMPLETION tokens."""

    def __init__(self, call: Sequence[int], end: int, config: RolloutConfig):
        super().__init__(config, vocabulary=50, stop_ids=[end])
        self.call, self.end = tuple(call), end
        self.asked, self.given = 0, 0  # requests, and finished ones

    def _serve(self, requests: Requests, sampling: Sampling) -> None:
        def finished(numbers: Sequence[int], completions: Sequence[Completion]) -> None:
            self.given += len(numbers)
            requests.finished(numbers, completions)

        super()._serve(Wrapped(requests, finished=finished), sampling)

    def _completion(self, seed: int) -> Completion:
        words = COMPLETION // 2 + seed % (COMPLETION + 1) - len(self.call) - 1
        ids = (*[40] * words, *self.call, self.end)
        self.asked += 1
        return Completion(ids, (-0.5,) * len(ids), "stop", 0)


def waiting_for_tools(folder: Path) -> dict[str, float]:
    """Measures the shares of time in which a slot of the engine was empty, and in which all were:
    1,000 concurrent rollouts, tools that take ten steps, and as many slots, half and a quarter of
    that. The environment's time between two steps counts as well.

    The end of a phase, with fewer and fewer rollouts, is reported separately.
    """
    found: dict[str, float] = {}
    model = save_calling(folder / "model", num_hidden_layers=1)
    for step in STEPS:
        for times in PLACES:
            name = f"{1000 * step:.0f} ms a step, {times} rollouts a place: "
            row = _slow_tools(folder, model, UNDER_WAY // times, step)
            found |= {name + figure: value for figure, value in row.items()}
    return found


def _slow_tools(folder: Path, model: Path, places: int, step: float) -> dict[str, float]:
    tokenizer, options = tokenizer_and_tools(folder, model, 10 * step)
    environment = ToolsEnvironment(options, tokenizer)
    call = tokenizer.encode_reply(f"<tool_call>{HEAD}1{TAIL}</tool_call>")
    (end,) = tokenizer.encode_reply(END)
    config = RolloutConfig(max_batch=places, max_prompt_tokens=1024, max_response_tokens=1024)
    engine = Calls(call, end, config)
    engine.load_weights([], version=0)
    ids = tokenizer.encode("1+3?", chat_template=True)
    prompts = [Prompt(ids, index=at, record='{"prompt": "1+3?"}') for at in range(TASKS)]
    lengths = [float(COMPLETION)] * TASKS
    tasks = Tasks(prompts, range(TASKS), lengths, Sampling(1.0))
    order = ordered(prompts, lengths, 1, places)
    queue = Counted(order, 0, board=dist.HashStore(), name="rollout")
    loop = asyncio.new_event_loop()
    clock = Clock(engine, step, lambda: queue.empty)
    pending = PendingRequests(
        engine, tasks, queue, environment, None, most_running=UNDER_WAY, loop=loop
    )
    with pending:
        assert pending.go_on(clock.step)
    found = clock.shares()
    loop.run_until_complete(environment.close())
    loop.close()
    return clock.before | {f"{name}, with the end": value for name, value in found.items()}


class Clock:
    """Clock makes each step of a scripted engine take so many seconds, and measures its
    idle time.
    """

    def __init__(self, engine: Calls, seconds: float, ending: Callable[[], bool]):
        """`ending` returns whether every task was started."""
        self._engine, self._seconds, self._ending = engine, seconds, ending
        self._began = time.perf_counter()
        self._given, self._tokens = 0, 0  # at the previous step, and so far
        self.before: dict[str, float] = {}  # the shares until all tasks were started

    def step(self) -> bool:
        time.sleep(self._seconds)
        self._tokens += min(self._engine.slots, self._engine.asked - self._given)
        self._given = self._engine.given
        if not self.before and self._ending():
            self.before = self.shares()
        return False

    def shares(self) -> dict[str, float]:
        """Returns the idle shares since the start."""
        steps = (time.perf_counter() - self._began) / self._seconds
        return {
            "idle engine": 1 - self._engine.steps / steps,
            "idle places": 1 - self._tokens / (self._engine.slots * steps),
        }


def tools_against_a_plain_loop(folder: Path) -> dict[str, float]:
    """Measures turns per second of the tools environment on vLLM, and of two asyncio loops: one
    that reads calls, awaits the tool and applies the chat template as a user's own would, and a
    bare one that knows every reply in advance. Completions have 7 tokens, 100 and 400.
    """
    found: dict[str, float] = {}
    for words in ROUNDS:
        own = folder / str(words)
        own.mkdir()
        (row,) = run_ranks(1, turns_body, own, words, timeout=1200)
        found |= {f"{words + 6} tokens: {name}": value for name, value in row.items()}
    return found


def turns_body(world: World, folder: Path, words: int) -> dict[str, float]:
    from rftmega.rollout.engines.vllm import VLLMEngine

    os.environ["LOCAL_WORLD_SIZE"] = str(world.size)
    table, said = talkative(words)
    model = save_calling(folder / "model", table, said, num_hidden_layers=2)
    tokenizer, options = tokenizer_and_tools(folder, model, 0)
    config = RolloutConfig(
        max_prompt_tokens=1024, max_response_tokens=1024, cpu_cache_gib=1.0, max_batch=64
    )
    engine = VLLMEngine(model, config, world, dtype="float32", stop_ids=tokenizer.stop_ids)
    environment = ToolsEnvironment(options, tokenizer)
    manager = build_manager(model, ParallelConfig())
    phases = DevicePhases({"policy": manager.residency}, offload=False)
    pool = EnginePool(engine, phases, world, environment, processes_per_engine=1, restarts=0)
    pool.weight_sync(manager.shards(), bucket_bytes=2**20).push(version=0)
    ids = tokenizer.encode("1+3?", chat_template=True)
    size = SIZE
    prompts = [Prompt(ids, index=at, record='{"prompt": "1+3?"}') for at in range(size)]
    asked: dict[str, Any] = {"seeds": range(size), "sampling": Sampling(1.0)}
    rollouts = pool.generate(prompts, **asked)
    known = [_parts(rollout) for rollout in rollouts if rollout is not None]
    turns = sum(len(completions) for _, completions, _ in known)

    def run(loop_of: Callable[[], PlainLoop]) -> None:
        assert loop_of().run() == [completions for _, completions, _ in known], "other answers"

    found: dict[str, float] = {}
    loops: dict[str, Callable[[], PlainLoop]] = {
        "plain": lambda: OwnLoop(engine, known, tokenizer.inner, specs_of(options)),
        "bare": lambda: PlainLoop(engine, known),
    }
    for name, loop_of in loops.items():
        both = compare(
            lambda: pool.generate(prompts, **asked),
            partial(run, loop_of),
            rounds=ROUNDS[words],
        )
        found |= {
            f"environment_turns_a_second beside the {name} loop": turns / both.ours,
            f"{name}_turns_a_second": turns / both.theirs,
            f"environment_over_{name}": both.ratio,
        }
    pool.close()
    return found


Known = tuple[tuple[int, ...], list[tuple[int, ...]], list[tuple[int, ...]]]


def _parts(rollout: Rollout) -> Known:
    """Returns the prompt, the completions, and the replies to all but the last."""
    (one,) = rollout.trajectories
    ids = tuple(one.token_ids.tolist())
    completions = [turn for turn in one.turns if turn.role == "assistant"]
    replies = [
        ids[turn.stop : after.start]
        for turn, after in zip(completions, completions[1:], strict=False)
    ]
    return (
        ids[: completions[0].start],
        [ids[turn.start : turn.stop] for turn in completions],
        replies,
    )


class PlainLoop:
    """PlainLoop runs one coroutine per rollout over a vLLM engine, and nothing else: it knows the
    tools' replies.

    It uses the engine as any vLLM user would: the engine detects stops by itself, and queues
    requests beyond its slots. It is the engine's `requests`, and passes on everything at once.
    """

    wants_parts = False

    def __init__(self, engine: Any, known: Sequence[Known]):
        self._engine, self._known = engine, known
        self._loop = asyncio.new_event_loop()
        self._new: list[Request] = []
        self._waiting: dict[int, asyncio.Future[Completion]] = {}
        self._asked = 0

    def run(self) -> list[list[tuple[int, ...]]]:
        """Returns the completions of each rollout."""
        tasks = [self._loop.create_task(self._rollout(place)) for place in range(len(self._known))]
        self._advance()
        self._engine.serve(self, sampling=Sampling(1.0))
        found = [task.result() for task in tasks]
        self._loop.close()
        return found

    def take(self, room: int) -> list[Request]:
        """Returns all new requests."""
        new, self._new = self._new, []
        return new

    def finished(self, numbers: Sequence[int], completions: Sequence[Completion]) -> None:
        """Resumes the rollouts that waited for these completions."""
        for number, completion in zip(numbers, completions, strict=True):
            self._waiting.pop(number).set_result(completion)
        self._advance()

    def broken_off(self, parts: Mapping[int, PartialCompletion]) -> None: ...

    def stopped(self) -> bool:
        return False

    def _advance(self) -> None:
        for _ in range(2):
            self._loop.call_soon(self._loop.stop)
            self._loop.run_forever()

    async def _rollout(self, place: int) -> list[tuple[int, ...]]:
        context, completions, replies = self._known[place]
        found = []
        for turn in range(len(completions)):
            seed = turn_seed(place, turn)
            completion = await self._ask(Request(context, seed, place, 0.0))
            found.append(tuple(completion.token_ids))
            if turn < len(replies):
                context = (*context, *found[-1], *replies[turn])
        return found

    async def _ask(self, request: Request) -> Completion:
        future: asyncio.Future[Completion] = self._loop.create_future()
        self._waiting[self._asked] = future
        self._asked += 1
        self._new.append(request)
        return await future


class OwnLoop(PlainLoop):
    """OwnLoop reads the calls, awaits the tool, and tokenizes the whole conversation with the chat
    template in every turn.
    """

    def __init__(self, engine: Any, known: Sequence[Known], tokenizer: Any, specs: list[Any]):
        """`tokenizer`: transformers' own. `specs`: the tools in the format of OpenAI's API."""
        super().__init__(engine, known)
        self._tokenizer, self._specs = tokenizer, specs

    async def _rollout(self, place: int) -> list[tuple[int, ...]]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "1+3?"}]
        found: list[tuple[int, ...]] = []
        while True:
            context = self._tokenizer.apply_chat_template(
                messages, tools=self._specs, add_generation_prompt=True, return_dict=False
            )
            seed = turn_seed(place, len(found))
            completion = await self._ask(Request(tuple(context), seed, place, 0.0))
            found.append(tuple(completion.token_ids))
            text = self._tokenizer.decode(completion.token_ids).removesuffix(END)
            messages.append({"role": "assistant", "content": text})
            call = CALL.search(text)
            if call is None or len(found) == TURNS:
                return found
            reply = await added(**json.loads(call[1])["arguments"])
            messages.append({"role": "tool", "content": json.dumps(reply)})


async def added(a: int) -> int:
    await asyncio.sleep(0)
    return a + 3
