"""What a config does, seen without Megatron's kernels and without an engine's model.

`program` is train_rl.py's own run: data, rewards, experience, losses, micro-batches, metrics,
files. In place of the model stands a table of bigrams, in place of the engine a seeded one. The
others look at what the right column is built with.
"""

import gzip
import importlib
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rftmega.backends.megatron import actor, manager, model_runner
from rftmega.backends.optimizers import build
from rftmega.config import RunConfig
from rftmega.core.errors import RFTMegaError
from rftmega.core.interfaces import OneProcess
from rftmega.core.types import Metrics, Prompt, Sampling, TokenStats, TokenValues
from rftmega.data import splits  # noqa: F401  before its Tokenizer is replaced
from rftmega.data import tokenizer as tokenizers
from rftmega.model_providers.description import describe
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.monitoring import callbacks
from rftmega.monitoring.observers import assemble
from rftmega.monitoring.observers.observer import Observer
from rftmega.monitoring.observers.trajectories import Trajectories
from rftmega.rewards.exact_match import exact_match_rule
from rftmega.rewards.part import Rule
from rftmega.rollout import engines as rollout_engines
from rftmega.rollout.servers import server_engine as servers
from rftmega.rollout.servers.vllm import auth
from rftmega.run.placement import engines, reinforcement, supervised
from rftmega.run.placement.teachers import build as build_teachers
from rftmega.run.train import task_of
from rftmega.runtime import device
from rftmega.runtime.parallel import nodes, process_group
from rftmega.runtime.parallel.process_group import World
from rftmega.trainer import Algorithm
from tests.rollouts import Alone
from tests.server_groups import set_servers

WORDS, STOP = 4, 3
WAYS = (
    *("SharedWeights", "NetworkWeights", "DiskWeights"),
    *("CheckpointWeights", "BroadcastWeights"),
)
ALONE = World(0, 1, 0, 1, torch.device("cpu"))
Seen = list[Any]


class Letters:
    """A tokenizer: the ids of 1, 2 and 3 are 0, 1 and 2; 3 ends an answer."""

    stop_ids = (STOP,)
    template = SimpleNamespace(source=lambda: "")
    named = 0

    def __init__(self, seen: Seen, folder: str | Path, **settings: Any):
        seen.append(("tokenizer", settings))
        self.chat = settings["chat"]

    def encode(self, prompt: Any, *, chat_template: bool) -> tuple[int, ...]:
        text = (
            prompt if isinstance(prompt, str) else "".join(message["content"] for message in prompt)
        )
        return ((0, 1) if chat_template else ()) + tuple(ord(letter) % 3 for letter in text)

    def encode_response(
        self, prompt: Any, completion: str, *, chat_template: bool
    ) -> tuple[int, ...]:
        return (*self.encode(completion, chat_template=False), STOP)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("123"[i] for i in ids if i < STOP)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [str(i) for i in ids]


class Machine:
    """A model of one table, and how it is stepped."""

    def __init__(self, cfg: RunConfig, seen: Seen, shape: tuple[int, ...], data_parallel: int):
        self.cfg, self.seen = cfg, seen
        self.table = torch.zeros(shape, dtype=torch.float32, requires_grad=True)
        module = torch.nn.Module()
        module.table = torch.nn.Parameter(self.table)
        self.table, self.model, self.where = module.table, [module], torch.device("cpu")
        self.config = SimpleNamespace(
            sequence_parallel=False, tensor_model_parallel_size=1, fp8=None
        )
        self.learning_rate = 1.0
        self.dtype = torch.float32
        self.description = describe(read_hf_config(Path(cfg.model.path)))
        self.topology = SimpleNamespace(
            data=data_parallel,
            data_rank=0,
            context=1,
            context_rank=0,
            pipeline=1,
            sum_of_speakers=lambda x: x,
            speaks=True,
        )

    def train(self, learning: bool) -> None: ...

    def zero_grad(self) -> None:
        self.table.grad = torch.zeros_like(self.table)

    def run_schedule(
        self, forward_step: Any, batches: Sequence[Any], *, forward_only: bool
    ) -> list[Any]:
        source, found, count = iter(batches), [], 0
        self.seen.append(("micro-batches", [batch.rows.lengths.tolist() for batch in batches]))
        for _ in batches:
            output, finish = forward_step(source, self.model[0])
            if forward_only:
                found.append(finish(output, non_loss_data=True))
            else:
                total, number, sums = finish(output)
                total.backward()
                count += int(number)
                found.append(sums)
        if not forward_only:
            self.table.grad /= max(count, 1)
            self.seen.append(("gradient", self.table.grad.tolist()))
        return found

    def take_step(self) -> tuple[bool, float]:
        self.table.data -= 20 * self.table.grad
        return True, float(self.table.grad.norm())

    def finish_param_sync(self) -> None: ...

    def refuse_lost_gradient(self) -> None: ...


def bigrams(
    module: Any,
    tokens: Tensor,
    *_: Any,
    value_model: bool,
    logits_processor_args: Any,
    temperature: float,
    **__: Any,
) -> Any:
    if value_model:
        return module.table[tokens]
    every = (module.table[tokens] / temperature).log_softmax(-1)
    logp = every.gather(-1, logits_processor_args["targets"][..., None])[..., 0]
    return {"logp": logp, "entropy": -(every.exp() * every).sum(-1)}


class Model:
    """Policy, critic or reward model, by the real Passes over a Machine."""

    def __init__(self, cfg: RunConfig, seen: Seen, data_parallel: int, *, values: bool = False):
        self.machine = Machine(cfg, seen, (WORDS,) if values else (WORDS, WORDS), data_parallel)
        self.runner = model_runner.MegatronRunner(
            self.machine, TokenValues if values else TokenStats, None if values else object()
        )
        self.reference = self.machine.table.detach().clone()

    def log_probs(self, rows: Any, *, temperature: float | None = None) -> TokenStats[Any]:
        return self.runner.score(rows, temperature=temperature)

    def reference_log_probs(self, rows: Any) -> TokenStats[Any]:
        kept = self.machine.table.data.clone()
        self.machine.table.data = self.reference
        found = self.runner.score(rows)
        self.machine.table.data = kept
        return found

    starting_sum, dtype = 0, torch.float32

    def starting_log_probs(self, rows: Any) -> TokenStats[Any]:
        return self.reference_log_probs(rows)

    def values(self, rows: Any) -> Any:
        return self.runner.score(rows).value

    def step(self, experience: Any, loss_fn: Any, **settings: Any) -> Metrics:
        return self.runner.step(experience, loss_fn, **settings)


def given_size(config: RunConfig) -> int:
    """Returns the size of the batches of data.ptx, or 0 if teachers don't train on it."""
    order = splits.ptx_of(config, Letters([], "", chat=None))
    return order.batch_size if order is not None and config.given_completions else 0


def shares(config: RunConfig) -> bool:
    return Model(config, [], 1).runner.shares


class Strategy:
    """Both of rftmega.run.placement's, as far as train_rl.py uses them."""

    def __init__(self, config: RunConfig, seen: Seen, data_parallel: int):
        self.seen = seen
        self.host = OneProcess()
        self.policy = Model(config, seen, data_parallel)
        self.critic = (
            Model(config, seen, data_parallel, values=True)
            if config.algorithm.advantage.needs_critic
            else None
        )
        self.scoring_models = {
            name: Model(config, seen, data_parallel, values=True)
            for name in config.reward.scoring_models()
        }
        for model in self.scoring_models.values():
            model.machine.table.data = torch.arange(WORDS, dtype=torch.float32)
        self.model = self.policy
        if config.algorithm.task == "reward_model":
            self.model = Model(config, seen, data_parallel, values=True)
        self.inner = Alone(config.rollout, vocabulary=WORDS, stop_ids=[STOP])
        self.engine = self.weights = self.checkpoints = self
        self.label = ""
        self.inputs: dict[str, Any] = {}

    def step(self, *given: Any, **named: Any) -> Metrics:
        return self.model.step(*given, **named)

    def resume(self) -> None:
        self.seen.append("asked for a checkpoint")

    def save(self, state: dict[str, Any], *, step: int) -> None:
        self.seen.append(
            ("saved", step, json.loads(json.dumps(state, default=torch.Tensor.tolist)))
        )

    def wait(self) -> None: ...

    def push(self, *, version: int) -> Metrics:
        self.inner.load_weights([], version=version)
        return {}

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        seeds: Sequence[int],
        sampling: Sampling,
        reward: Any = None,
        enough: Any = None,
        expected_lengths: Any = None,
    ) -> Any:
        """With `enough` the first so many, one more each time."""
        self.seen.append(("asked", [prompt.token_ids for prompt in prompts], list(seeds), sampling))
        completions = self.inner.generate(prompts, seeds=seeds, sampling=sampling)
        if enough is None:
            return completions
        if reward is not None:
            completions = [
                replace(x, scores=score)
                for x, score in zip(completions, reward(prompts, completions), strict=True)
            ]
        for number in range(len(completions) + 1):
            found = completions[:number] + [None] * (len(completions) - number)
            if enough(found):
                return found
        return completions

    def weight_sync(self, shards: Any, *, bucket_bytes: int) -> Any: ...

    def export(self, folder: str) -> None:
        self.seen.append(("exported", folder))

    def close(self) -> None: ...


def recorded(seen: Seen, name: str) -> type:
    """A part of a reward that tells what it was made with, and likes long answers."""

    class Recorded:
        def __init__(self, *given: Any, **named: Any):
            seen.append((name, [x for x in given if not callable(x)], named))

        def __call__(self, completions: Sequence[Any]) -> list[float]:
            return [float(len(completion.response)) for completion in completions]

        def answer_in(self, response: str) -> str:
            return response

    return Recorded


def recorded_rule(seen: Seen, pattern: str, **options: bool) -> Rule:
    """The rule of exact match, which tells its options: no answer of Letters has a case."""
    seen.append(("exact_match_rule", options))
    return exact_match_rule(pattern, **options)


def program(config: RunConfig, *, data_parallel: int = 1) -> Seen:
    """All that a run asks, computes and writes; or the error that it ends with."""
    seen: Seen = []
    output = Path(config.trainer.output)
    shutil.rmtree(output, ignore_errors=True)

    @contextmanager
    def start(**_: Any) -> Iterator[World]:
        yield ALONE

    class Written(Trajectories):
        def __init__(self, *given: Any, **named: Any):
            super().__init__(*given, **named)
            told = {name: given for name, given in named.items() if not callable(given)}
            seen.append(("trajectories", told))

    def strategy(config: RunConfig, *_: Any, environment: Any = None, **__: Any) -> Strategy:
        seen.append(("environment", type(environment).__name__))
        return Strategy(config, seen, data_parallel)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizers, "Tokenizer", partial(Letters, seen))
        patch.setattr(process_group, "start", start)
        patch.setattr(nodes, "check_nodes", lambda *_: None)
        patch.setattr(callbacks, "measures_of", lambda _: [])
        patch.setattr(callbacks, "RunSummary", lambda *_: Observer())
        patch.setattr(reinforcement, "ReinforcementStrategy", strategy)
        patch.setattr(supervised, "SupervisedStrategy", strategy)
        patch.setattr(model_runner, "custom_forward", bigrams)
        patch.setattr(assemble, "TensorBoard", lambda *_, **__: Observer())
        patch.setattr(assemble, "Progress", lambda *_: Observer())
        patch.setattr(assemble, "Trajectories", Written)
        made = importlib.import_module("rftmega.rewards.create")
        patch.setattr(made, "exact_match_rule", partial(recorded_rule, seen))
        for name in ("MathPart", "CodePart", "RemotePart", "JudgePart"):
            patch.setattr(made, name, recorded(seen, name))
        try:
            task_of(config)(config)
        except RFTMegaError as error:
            seen.append(("error", str(error)))
    for file in sorted(path for path in output.rglob("*") if path.is_file()):
        text = (
            gzip.decompress(file.read_bytes()).decode()
            if file.suffix == ".gz"
            else file.read_text(errors="replace")
        )
        seen.append(
            (
                str(file),
                text
                if file.name != "metrics.jsonl"
                else [timeless(line) for line in text.splitlines()],
            )
        )
    return seen


def timeless(line: str) -> Metrics:
    return {
        name: x for name, x in json.loads(line).items() if name != "time" and "second" not in name
    }


class Built(Exception):
    """What is looked at is there; the rest is not built."""


def transformer(config: RunConfig) -> dict[str, Any]:
    """Megatron's config of the model."""
    found: dict[str, Any] = {}
    real = manager.transformer_config

    def keep(*given: Any, **named: Any) -> None:
        found.update({name: str(value) for name, value in vars(real(*given, **named)).items()})
        raise Built

    with pytest.MonkeyPatch.context() as patch, suppress(Built):
        patch.setattr(manager, "transformer_config", keep)
        manager.MegatronModelManager(config, None)
    assert found
    return found


def stepping(config: RunConfig) -> list[Any]:
    """Megatron's configs of optimizer and data parallelism, and the learning rate of every step."""
    made = object.__new__(manager.MegatronModelManager)
    made.cfg, made.model, made.value_model = config, [], False
    made.config = SimpleNamespace(bf16=False, params_dtype=torch.float32)
    made.description = SimpleNamespace(experts=None)
    made.topology = SimpleNamespace(tensor=1, context=1, pipeline=1, data=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "get_megatron_optimizer", lambda chosen, *_, **__: chosen)
        patch.setattr(manager, "DistributedDataParallel", lambda _, chosen, *__, **___: chosen)
        found = [
            str(asdict(made._build_optimizer())),
            str(asdict(made._wrap(torch.nn.Module(), 0))),
        ]
    group = {"lr": 0.0, "weight_decay": 0.0}
    made.optimizer = SimpleNamespace(param_groups=[group])
    schedule = made._build_scheduler()
    for _ in range(config.trainer.steps * config.algorithm.steps_per_rollout):
        schedule.step(1)
        found.append(dict(group))
    return found


def averaged(config: RunConfig) -> Seen:
    """The policy's moving average."""
    seen: Seen = []
    stands_in = SimpleNamespace(
        residency=None,
        weights=None,
        description=SimpleNamespace(vocabulary=WORDS),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actor.MegatronActor, "prepare_to_learn", lambda _: None)
        for name in ("MegatronModelManager", "MegatronRunner", "LogProbs", "ReferenceWeights"):
            patch.setattr(actor, name, lambda *_, **__: stands_in)
        patch.setattr(
            actor,
            "AveragedWeights",
            lambda residency, weights, beta: seen.append(beta) or SimpleNamespace(update=None),
        )
        actor.MegatronActor(config, None)
    return seen


def built(config: RunConfig) -> Seen:
    """What the strategy puts together: engines and their kind, turns, weight transfer, value
    models.
    """
    seen: Seen = []

    def kept(name: str) -> Any:
        def make(*_: Any, **named: Any) -> Any:
            seen.append(
                (name, {key: x for key, x in named.items() if not isinstance(x, RunConfig)})
            )
            quiet = ("start", "push", "sleep", "close")
            still: dict[str, Any] = {which: lambda: None for which in quiet}

            def weight_sync(_: Any, **planned: Any) -> Any:
                seen.append(("weight transfer", planned))
                return SimpleNamespace(push=None)

            still["weight_sync"] = weight_sync
            return SimpleNamespace(
                residency=SimpleNamespace(only=lambda: seen.append(("makes room", name))),
                description=SimpleNamespace(
                    family="", parameters=0, vocabulary=WORDS, experts=None
                ),
                shards=list,
                dtype="",
                layout="",
                label="",
                path="",
                sum_of_frozen=None,
                **still,
            )

        return make

    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "EngineNumerics",
            "DevicePhases",
            "EnginePool",
            "ServerPool",
            "StreamingPool",
            "ColocatedPolicy",
        ):
            patch.setattr(reinforcement, name, kept(name))
        patch.setattr(engines, "create", kept("create"))
        patch.setattr(reinforcement, "predicted", lambda *_: None)
        patch.setattr(reinforcement, "rehearse", lambda *_: None)
        real = kept("value model of a role")
        backend = SimpleNamespace(
            policy=kept("policy"),
            value_model=lambda cfg, **named: seen.append(("value model", cfg)) or real(**named),
        )
        reinforcement.ReinforcementStrategy(config, ALONE, backend, stop_ids=[STOP])
    return seen


def value_model(config: RunConfig) -> RunConfig:
    """The config that the critic, or the reward model, is built with."""
    return next(x[1] for x in built(config) if x[0] == "value model")


def taught_by(config: RunConfig) -> Seen:
    """The folders, backends and layouts of the teachers that the strategy builds."""
    seen: Seen = []

    class Backend:
        def teacher(self, own: RunConfig) -> Any:
            seen.append((own.model.path, own.backend, own.parallel))

    build_teachers(config, Backend(), is_main=False)  # type: ignore[arg-type]
    return seen


class WithAnyName(ModuleType):
    """A module from which every name can be imported, as None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def engine(config: RunConfig, *, kind: str = "cpu", processes: int = 1) -> Seen:
    """What vLLM is told, in this process or in servers."""
    seen: Seen = []
    modules = (
        *("vllm", "vllm.sampling_params", "vllm.v1", "vllm.v1.engine", "vllm.model_executor"),
        *("vllm.model_executor.model_loader", "vllm.model_executor.model_loader.reload"),
        *("vllm.distributed", "vllm.distributed.parallel_state"),
        "rftmega.weights.receivers.reload",
        "rftmega.weights.receivers.adapter",
        "rftmega.rollout.engines.expert_routing",
        "rftmega.rollout.engines.compiled_classes",
        "rftmega.rollout.engines.draft_model",
        "rftmega.rollout.engines.speculative_verification",
    )
    fake = {name: WithAnyName(name) for name in modules}
    idle = SimpleNamespace(add_request=lambda *_: None, has_unfinished_requests=lambda: False)
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=None))
    executor = SimpleNamespace(driver_worker=worker)
    idle.engine_core = SimpleNamespace(engine_core=SimpleNamespace(model_executor=executor))
    started = SimpleNamespace(
        apply_model=lambda work: [None], llm_engine=idle, reset_prefix_cache=lambda: None
    )
    fake["vllm"].LLM = lambda **named: seen.append(named) or started
    fake["vllm"].SamplingParams = lambda **_: None
    changed = SimpleNamespace(collected=nullcontext, give_to=lambda model: None)
    fake["rftmega.rollout.engines.compiled_classes"].ChangedClasses = lambda: changed
    fake["rftmega.rollout.engines.speculative_verification"].install = lambda: None
    fake["rftmega.rollout.engines.speculative_verification"].check_installed = lambda runner: None
    fake["rftmega.weights.receivers.adapter"].adapters_of = lambda evaluated: {"": None}
    fake["rftmega.weights.receivers.reload"].FreshParameters = lambda *_, **__: None

    class Server:
        def __init__(self, arguments: Sequence[str], environment: Any, log: Path):
            seen.append((list(arguments), str(log)))

        own = alive = True

        def wait(self) -> None: ...

    def elsewhere(address: str, headers: Any, *, tls: Any) -> Any:
        seen.append((address, tls is not None))
        return SimpleNamespace(
            own=False,
            address=address,
            there=lambda: True,
            identity=lambda: "",
            claim=lambda name: None,
        )

    def sync(shards: Any, engine: Any, **given: Any) -> None:
        seen.append(given)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "HF_HUB_OFFLINE", "TORCHDYNAMO_DISABLE",
                     "VLLM_CPU_OMP_THREADS_BIND"):  # fmt: skip
            patch.setenv(name, "ERROR")
        patch.setenv(auth.KEY, "key")
        for name, module in fake.items():
            patch.setitem(sys.modules, name, module)
        # whatever is there, comes back or goes
        patch.setitem(sys.modules, "rftmega.rollout.engines.vllm", ModuleType("vllm"))
        del sys.modules["rftmega.rollout.engines.vllm"]
        patch.setattr(
            device, "current", lambda: SimpleNamespace(type=kind, train_dtype=torch.float32)
        )
        patch.setattr(servers, "Server", Server)
        for spoken in ("ServerClient", "StockClient", "SGLangClient"):
            patch.setattr(servers, spoken, elsewhere)
        for way in WAYS:
            patch.setattr(servers, way, sync)
        patch.setattr(servers, "devices_of", lambda *_: {})
        patch.setattr(engines, "run_identity", lambda output: "")
        patch.setattr(servers.ServerEngine, "_check", lambda self, server: None)
        made = engines.create(
            config,
            World(0, processes, 0, processes, torch.device("cpu")),
            vocabulary=WORDS,
            stop_ids=[STOP],
        )
        seen.append(type(made).__name__)
        if isinstance(made, servers.ServerEngine):
            made.server_group.renew()
            made.weight_sync([], bucket_bytes=1)
    if hasattr(rollout_engines, "vllm"):
        del rollout_engines.vllm
    return seen


def schedule(config: RunConfig) -> Seen:
    """When answers are generated, and how old they may be."""
    made = Algorithm(config).rollout_schedule(SimpleNamespace(begin=None, join=None), None)
    return [type(made).__name__, made.max_staleness]


def update(config: RunConfig) -> Seen:
    """What servers are asked as a push begins."""
    elsewhere = World(1, 2, 1, 2, torch.device("cpu"))
    engine = servers.ServerEngine(
        "model", config.rollout, elsewhere, dtype="float32", stop_ids=[], logs="logs"
    )
    seen: Seen = []
    set_servers(
        engine, SimpleNamespace(own=True, alive=True, post=lambda path, body: seen.append(path))
    )
    engine.begin()
    return seen
