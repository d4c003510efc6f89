"""Schema of all options: the type, default and meaning of each option.

`rftmega train --help` prints this file's docstrings.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from omegaconf import MISSING
from pydantic import Discriminator

from rftmega.config.options.adapters import LoRA
from rftmega.config.options.agents import Agent, Verifiers
from rftmega.config.options.algorithms import AlgorithmConfig
from rftmega.config.options.bounds import (
    AtLeastTwo,
    AtMostOne,
    BelowOne,
    Count,
    NotNegative,
    NotNegativeInt,
    Positive,
    PositiveBelowOne,
    PositiveShare,
    Share,
)
from rftmega.config.options.environments import GivenEnvironment, SingleTurn, Tools
from rftmega.config.options.parallel import ParallelConfig
from rftmega.config.options.parts import RewardPart
from rftmega.config.options.scoring_models import ScoringModel
from rftmega.config.options.secrecy import SecretText
from rftmega.config.options.speculative import DraftModel, LookupDrafts, NoDrafts
from rftmega.config.options.text_games import OpenEnv, TextArena
from rftmega.config.user_code.functions import name_of


@dataclass
class ModelConfig:
    path: str = MISSING
    """Hugging Face folder of the policy: config.json, *.safetensors, tokenizer files. Or a model of
    the Hub, org/name or org/name@revision, which is downloaded into its cache.
    """

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Training dtype: float32, bfloat16, or auto (bfloat16 on CUDA, float32 on CPU)."""

    fp8: Literal["none", "blockwise", "mxfp8"] = "none"
    """FP8 matmuls in the model's layers, with one scale per block (Transformer Engine): blockwise
    on Hopper, mxfp8 on Blackwell; weights stay bfloat16 (docs/optimizers.md).
    """

    dropout: BelowOne = 0.0
    """Dropout of hidden states and attention in training; scoring uses no dropout."""

    freeze_vision: bool = False
    """Freeze the vision tower (or audio encoder) of a multimodal model and train only its decoder.
    """

    lora: LoRA = field(default_factory=LoRA)

    ignore_config_fields: list[str] = field(default_factory=list)
    """Fields of config.json to ignore, in every model's folder: fields that the model's class in
    transformers knows but this package does not support, which are otherwise an error
    (docs/supported_architectures.md).
    """

    trust_remote_code: bool = False
    """Allow the tokenizer to be Python code in model.path, which then runs here."""

    verify: bool = False
    """Verify the checksums of all files of every Hugging Face folder that the run starts from
    before reading them: against the folder's checksums.json, or the Hub's own checksums if it was
    downloaded with the Hub's tools. For a folder without checksums the first such run writes
    checksums.json.
    """


@dataclass
class OptimizerConfig:
    name: Literal["adam", "muon"] = "adam"
    """adam; or muon (Keller Jordan 2024), which uses Muon for matrices and Adam for the rest and
    needs the package emerging_optimizers (docs/optimizers.md; backend=megatron).
    """

    learning_rate: NotNegative = 1e-6
    """Peak learning rate."""

    vision_learning_rate: NotNegative = 0.0
    """Peak learning rate of the vision tower (or audio encoder), on the same schedule; 0: that of
    the rest.
    """

    min_learning_rate: NotNegative = 0.0
    """Final learning rate of the linear and cosine schedules."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule after the warm-up: constant, linear or cosine."""

    warmup_steps: NotNegativeInt = 0
    """Optimizer steps of linear warm-up from 0."""

    weight_decay: NotNegative = 0.01
    """Decoupled weight decay (AdamW); norms and biases are exempt."""

    beta1: BelowOne = 0.9
    """Adam's decay rate of the first moment."""

    beta2: BelowOne = 0.95
    """Adam's decay rate of the second moment."""

    epsilon: Positive = 1e-8
    """Adam's epsilon."""

    states: Literal["float32", "bfloat16", "8bit"] = "float32"
    """Precision of Adam's two moments; main parameters are always float32. bfloat16 and 8bit
    (block-wise, arXiv:2110.02861) need the package torchao (docs/optimizers.md; backend=megatron).
    """

    clip_grad: NotNegative = 1.0
    """Maximum global gradient norm; 0: no clipping."""

    distributed: bool = True
    """Shard optimizer states over the data-parallel processes if there are several (Megatron's
    DistributedOptimizer). Muon's states are not sharded.
    """

    overlap_grad_reduce: bool = False
    """Overlap the reduction of gradients over data-parallel processes with the backward pass."""

    overlap_param_gather: bool = False
    """Overlap the gathering of updated parameters with the next forward pass; needs
    optimizer.distributed and overlap_grad_reduce.
    """

    def shards_states(self, copies: int) -> bool:
        """Returns whether optimizer states are sharded over `copies` processes that hold the same
        parameters.
        """
        return self.distributed and self.name == "adam" and copies > 1


@dataclass
class RolloutConfig:
    engine: Literal["vllm", "sglang", "transformers", "scripted"] = "vllm"
    """Rollout engine: vllm (fast), sglang (servers that you start yourself), transformers (slow and
    simple, a reference) or scripted (no model: seeded random tokens).
    """

    tensor: Count = 1
    """Tensor-parallel size of one engine; the number of colocated engines is processes / this."""

    servers: Count = 1
    """Number of vLLM servers to start (strategy=separate only), each with rollout.tensor processes
    of its own.
    """

    addresses: list[str] = field(default_factory=list)
    """Addresses of remote engine servers, as http://10.0.0.2:8100 (started with `rftmega serve`);
    the run then starts no servers itself (strategy=separate only).
    """

    server_list: str = ""
    """File with addresses of remote engine servers, one per line. It is read before each weight
    sync, so that servers can join and leave during the run.
    """

    transport: Literal["shared_memory", "network", "disk", "checkpoint"] = "shared_memory"
    """Weight sync to servers: shared_memory (on one host), network (slices over a process group of
    trainer and servers), disk (files on a shared file system) or checkpoint (Hugging Face folders,
    for servers without this package).
    """

    listen: str = "127.0.0.1"
    """transport=network: address of the trainer's first host at which servers reach it. Connections
    to it are not authenticated: use a network that only the run can access.
    """

    weights_folder: str = ""
    """transport=disk or checkpoint: folder that trainer and servers access under the same path;
    empty: weights, in trainer.output.
    """

    tls_ca: str = ""
    """PEM file with the CA certificates for servers with https://... addresses; empty: those of the
    system.
    """

    samples_per_prompt: Count = 8
    """Completions per prompt (num_generations in TRL): the group over which GRPO normalises."""

    train_samples_per_prompt: NotNegativeInt = 0
    """Train only on this many completions of each prompt, the first ones; all are scored, and vote
    in reward.majority. 0: all.
    """

    temperature: Positive = 1.0
    """Sampling temperature, above 0 (evaluation has its own); the trainer scores with the same
    temperature.
    """

    stop: list[str] = field(default_factory=list)
    """Stop strings: each ends a completion, which keeps it; in evaluation, too. The model's
    end-of-text tokens always end it.
    """

    max_prompt_tokens: Count = 1024
    """Maximum prompt length in tokens; a longer prompt is an error (see data.too_long)."""

    max_response_tokens: Count = 1024
    """Maximum response length in tokens, at which a completion is truncated; with several turns,
    all of them and the environment's messages between them count.
    """

    max_running: Count = 1024
    """Maximum number of concurrent rollouts per engine, including those that wait for a tool."""

    max_images: NotNegativeInt = 8
    """Maximum number of images per prompt of a vision-language model, or of waveforms per prompt of
    an audio-language model.
    """

    max_videos: NotNegativeInt = 0
    """Maximum number of videos per prompt of a vision-language model."""

    max_logprob_gap: NotNegative = 0.0
    """Maximum log-prob mismatch: the run stops before an update if the 99.9th percentile of the
    difference |engine - trainer| in log-probs is larger; 0: a default for the dtype (docs/push.md).
    """

    mean_logprob_gap: NotNegative = 0.0
    """Maximum mean log-prob mismatch, with the same effect; 0: a default for the dtype."""

    quantization: Literal["none", "fp8"] = "none"
    """fp8: engines run the linear layers of attention and MLP in FP8 with one scale per block of
    128 x 128, quantised anew at each weight sync; needs algorithm.importance_sampling
    (docs/push.md).
    """

    router_replay: Literal["none", "trainer", "engine"] = "none"
    """Router replay of MoE models: the experts that tokens are routed to in an update. none: those
    that the trainer's router chooses in the update; trainer: those that it chose when the rollout
    was scored; engine: those that the engine's router chose (docs/moe.md).
    """

    memory_fraction: PositiveBelowOne = 0.5
    """Share of GPU memory for the engine (gpu_memory_utilization in vLLM; CUDA only)."""

    cpu_cache_gib: Positive = 0.25
    """Size of one engine's KV cache in GiB (CPU only)."""

    max_batch: Count = 256
    """Maximum number of completions that one engine generates concurrently."""

    speculative: Annotated[NoDrafts | LookupDrafts | DraftModel, Discriminator("type")] = field(
        default_factory=NoDrafts
    )
    """Speculative decoding: an engine step verifies several drafted tokens of a completion at once
    (rollout.engine=vllm). Drafts don't change the completions of a seed (docs/speculative.md).
    """

    ahead: AtMostOne = 0
    """One-step off-policy training (strategy=separate): number of batches, 0 or 1, that are
    generated while the previous batch is trained on. They finish before the weight sync, so that
    results are reproducible; their policy is one version old.
    """

    on_update: Literal["wait", "abort", "recompute", "keep"] = "recompute"
    """Effect of new weights on requests in flight, with trainer.max_staleness and
    strategy=separate. wait: they finish first; abort: they are cancelled and continued from their
    tokens so far; recompute: they continue with a KV cache recomputed with the new weights; keep:
    they continue with the old weights' KV cache, a distribution that is neither policy's.
    """

    order: str = ""
    """File trained_order.jsonl of an earlier run with trainer.max_staleness, to train on its groups
    in the same order and drop the same groups; empty: train on groups as they finish.
    """

    deadline_seconds: Positive = 3600.0
    """strategy=separate: maximum time of one completion; a server that takes longer counts as hung
    and is restarted.
    """

    @property
    def max_row_tokens(self) -> int:
        """Returns the maximum number of tokens of a prompt and its response together."""
        return self.max_prompt_tokens + self.max_response_tokens


@dataclass
class DataConfig:
    train: str = ""
    """Training data: .jsonl, .jsonl.gz, .json, .csv, .parquet or .arrow, a folder saved by
    `datasets` ("folder#train": one split of several), a data set of the Hub (org/name#train), a
    Python function that yields dicts (my.py:rows), or tasks that a library creates
    (reasoning_gym://chain_sum?size=5000, docs/tasks.md).
    """

    sources: dict[str, float] = field(default_factory=dict)
    """Several data sources instead of data.train, each with its sampling weight, as {a.jsonl: 3,
    b.parquet: 1}.
    """

    eval: str = ""
    """Evaluation prompts, in one of data.train's formats; empty: no evaluation (or data.evals)."""

    evals: dict[str, str] = field(default_factory=dict)
    """Several evaluation sets by name, e.g. data.evals.easy=FILE; their metrics are eval_easy_...,
    those of data.eval are eval_...
    """

    ptx: str = ""
    """Supervised data to train on beside the rollouts, in one of data.train's formats: with cross
    entropy (PPO-ptx, algorithm.ptx_coef), or with teachers (GKD, algorithm.on_policy_share).
    """

    prompt_key: str = "prompt"
    """Key of the prompt: a string, or a list of chat messages. In all keys of records, a.b means
    key b of the object under a.
    """

    alpaca_input_key: str = ""
    """Key of a text that is appended to the prompt after an empty line; empty: input if
    data.prompt_key is instruction (Alpaca), otherwise none.
    """

    trailing_assistant: Literal["continue", "reject"] = "continue"
    """Prompts that end with an assistant message: continue (completions continue its text, as in
    TRL) or reject.
    """

    label_key: str = "label"
    """Key of the label (ground truth) that the reward compares a response with; empty: there are no
    labels (reward.majority).
    """

    columns: dict[str, str] = field(default_factory=dict)
    """Further columns for rewards and environments, as {answer: reward_model.ground_truth}: a name,
    and the key of its value.
    """

    kind_key: str = "kind"
    """Key of the task type, by which reward.recipe chooses weights; a record may lack it."""

    images_key: str = "images"
    """Key of a prompt's images (docs/multimodal.md): one or a list; <image> in the prompt marks the
    position of one.
    """

    videos_key: str = "videos"
    """Key of a prompt's videos: one path or a list, of files (mp4, avi, mkv, ...) or of folders
    with the frames as images. <video> in the prompt marks the position of one.
    """

    audio_key: str = "audio"
    """Key of a prompt's waveforms (WAV, FLAC): one or a list; <audio> in the prompt marks the
    position of one.
    """

    video_fps: Positive = 2.0
    """Frames per second at which videos are sampled; also the frame rate of a folder of frames."""

    video_frames: AtLeastTwo = 32
    """Maximum number of frames per video, evenly spaced."""

    media_folder: str = ""
    """Folder that paths of images, videos and waveforms are relative to and must not leave; empty:
    the data file's folder.
    """

    media_hosts: list[str] = field(default_factory=list)
    """Web hosts from which images and videos may be downloaded, each file once, into media_folder
    before the run begins; empty: URLs are rejected.
    """

    response_key: str = "response"
    """Supervised data (including data.ptx), and KTO's single responses: key of the response to
    train on (not needed if the prompt's chat messages end with it).
    """

    tools_key: str = "tools"
    """Supervised and preference data: key of the functions passed to the chat template, a list of
    OpenAI's specs or its JSON text; a record may lack it.
    """

    trained_turns: Literal["last", "all"] = "last"
    """Supervised data: train on the last assistant message of a conversation, or on all of them
    (each with the context that it had).
    """

    chosen_key: str = "chosen"
    """Preference data: key of the chosen response, or of a conversation that ends with it, or of
    its number (better_response_id, safer_response_id) among response_0, response_1.
    """

    rejected_key: str = "rejected"
    """Preference data: key of the rejected response, or of a conversation that ends with it."""

    desirable_key: str = ""
    """KTO on single responses (data.response_key): key of the boolean that says whether a response
    is desirable; empty: records have pairs.
    """

    chat_template: bool = False
    """Apply the tokenizer's chat template to prompts given as strings, too (as one user message).
    """

    system_prompt: str = ""
    """System message added to every prompt that uses the chat template and begins with none."""

    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Additional arguments of the chat template, as {enable_thinking: false} for Qwen3."""

    keep_reasoning: bool = False
    """Keep the reasoning of the model's earlier turns in its context, though the chat template
    drops it, so that a conversation of several turns is one sequence.
    """

    chat_template_file: str = ""
    """Jinja file with a chat template that replaces the tokenizer's own."""

    control_tokens: Literal["reject", "text", "control"] = "reject"
    """Names of the tokenizer's special tokens, such as <|im_end|>, in the text of records. reject:
    refuse the record; text: encode them as ordinary text; control: encode them as special tokens,
    which may end a turn.
    """

    too_long: Literal["error", "drop"] = "error"
    """Prompts longer than rollout.max_prompt_tokens (responses: max_response_tokens). error: refuse
    them; drop: leave them out and report how many.
    """

    @property
    def held_out(self) -> dict[str, str]:
        """Returns name -> source of each evaluation set; the set of data.eval has the name ""."""
        return ({"": self.eval} if self.eval else {}) | self.evals


@dataclass
class ShapingConfig:
    normalise: bool = False
    """Normalise rewards by the running mean and standard deviation of all rewards of the run."""

    clip: NotNegative = 0.0
    """Clip rewards to +- this, after all other shaping; 0: no clipping."""

    overlong_buffer_share: Share = 0.0
    """Penalise responses that reach into this last share of rollout.max_response_tokens (DAPO's
    overlong buffer); 0: no penalty.
    """

    overlong_penalty_factor: NotNegative = 1.0
    """Penalty of a response of maximum length."""


@dataclass
class RewardConfig:
    exact_match: float = 1.0
    """Weight of exact match: the answer equals the label (except for surrounding white space). Its
    default is 0 if reward.functions, math, multiple_choice, code or task_library is used, which
    judge correctness as well.
    """

    exact_match_ignore_case: bool = False
    """Exact match ignores case: YES equals Yes."""

    exact_match_numeric: bool = False
    """Exact match compares numbers by value: 0.50 equals 0.5, and 1,000 equals 1e3."""

    answer_pattern: str = ""
    """Regular expression whose last match in a response (its first group, if it has one) is the
    answer that exact_match and majority compare and task_library scores; without a match there is
    no answer. Empty: the whole response.
    """

    reasoning_markers: list[str] = field(default_factory=list)
    """Opening and closing marker of a model's reasoning, as [<scratch>, </scratch>]. Reasoning is
    removed before a response is graded, and a response with unfinished reasoning scores 0; format
    and reward functions of your own see it. Empty: the markers of the chat template, and <think>.
    """

    format: float = 0.0
    """Weight of the format reward: the whole response matches format_pattern."""

    format_pattern: str = ""
    """Regular expression of the format reward; it sees the response only."""

    math: float = 0.0
    """Weight of the math reward: the response's last expression equals the label's mathematically
    (math-verify).
    """

    math_seconds: Positive = 5.0
    """Time limit for reading and comparing one expression; beyond it the response scores 0."""

    multiple_choice: float = 0.0
    """Weight of the multiple-choice reward: the response chooses the label's letter."""

    code: float = 0.0
    """Weight of the code reward: the response's Python code passes the label's tests in a sandbox
    (docs/rewards.md).
    """

    task_library: float = 0.0
    """Weight of the score that the library of a task gives to the answer (docs/tasks.md). Its default
    is 1 if all data are tasks of a library (reasoning_gym://...) and no other reward is given.
    """

    code_seconds: Positive = 10.0
    """Wall-clock limit of all tests of one response together."""

    code_memory_mib: Count = 1024
    """Maximum address space of a tested process."""

    code_tests_inside: bool = False
    """Run a label's tests in the same interpreter as the tested code, which tests need that pass it
    functions or objects of their own; code written for that purpose can then forge the result
    (docs/rewards.md).
    """

    timeout: Positive = 1800.0
    """Maximum seconds for scoring completions that finished together; a run whose reward takes
    longer ends.
    """

    workers: Count = 2
    """Number of responses that the components math, code and task_library each score in parallel,
    each in a process of its own.
    """

    remote: float = 0.0
    """Weight of the remote reward: the number that remote_url returns."""

    remote_url: SecretText = ""
    """URL to which prompts, responses, labels and task types (kinds) are posted as JSON; it must
    return {"rewards": [float, ...]}.
    """

    remote_timeout: Positive = 30.0
    """Maximum seconds of one request."""

    remote_retries: NotNegativeInt = 4
    """Maximum retries after a lost connection, a timeout, status 429 or 5xx, with doubling pauses.
    """

    remote_batch: Count = 64
    """Maximum number of responses per request."""

    judge: float = 0.0
    """Weight of the judge (LLM-as-a-judge): the rating of a language model at judge_url, from 0 to
    1 (docs/rewards.md).
    """

    judge_url: str = ""
    """URL of an OpenAI-compatible API: https://host/v1, or that of its chat completions."""

    judge_model: str = ""
    """Name of the judge model in that API."""

    judge_key_env: str = ""
    """Environment variable that holds the API key, on every host; empty: no key is sent."""

    judge_template: str = ""
    """Prompt for the judge, with {prompt}, {completion}, {label} and {messages}: text, or a file
    that ends in .txt or .md; empty: a prompt that asks for a score from 0 to 10.
    """

    judge_pattern: str = r"(?i)score[\s*:=]{0,9}(-?\d+(?:\.\d+)?)"
    """Regular expression whose last match in the judge's response (its first group, if it has one)
    is the score. Without a match the score is undecided.
    """

    judge_scale: list[float] = field(default_factory=lambda: [0.0, 10.0])
    """Worst and best score of the judge, which are mapped to 0 and 1; scores outside are undecided.
    """

    judge_temperature: NotNegative = 0.0
    """Sampling temperature of the judge."""

    judge_max_tokens: Count = 1024
    """Maximum tokens of the judge's response."""

    judge_timeout: Positive = 60.0
    """Maximum seconds of one request to the judge."""

    judge_retries: NotNegativeInt = 6
    """Maximum retries after a lost connection, a timeout, status 429 or 5xx, with doubling pauses,
    or longer ones if the server asks for them (Retry-After).
    """

    judge_per_second: NotNegative = 0.0
    """Maximum rate at which a process begins requests to the judge, per second; 0: unlimited."""

    judge_concurrency: Count = 8
    """Maximum number of concurrent requests of a process to the judge."""

    judge_cache: str = ""
    """File that caches the judge's responses across runs; empty: cached in memory only."""

    model: float = 0.0
    """Weight of a reward model's score (trained with algorithm.task=reward_model); the model must
    have the policy's parallel layout and vocabulary.
    """

    model_path: str = ""
    """Hugging Face folder of the reward model, a sequence classifier with one label."""

    cost: NotNegative = 0.0
    """Weight of a cost model's score, which is subtracted from the reward: higher scores mean more
    harmful (trained with algorithm.reward_model_loss=cost).
    """

    cost_path: str = ""
    """Hugging Face folder of the cost model, a sequence classifier with one label."""

    majority: bool = False
    """Majority vote over a prompt's completions as the reward, instead of labels (TTRL); the
    weights are then for evaluation only.
    """

    recipe: dict[str, dict[str, float]] = field(default_factory=dict)
    """Weights by task type, {task type: {component: weight}}, instead of the weights of the
    components' own options; every prompt's task type must be listed.
    """

    shaping: ShapingConfig = field(default_factory=ShapingConfig)

    functions: list[str] = field(default_factory=list)
    """Reward functions of your own, with TRL's signature (docs/rewards.md): [my_rewards.py:f], or
    [my_package.rewards:f]. With one, exact_match is 0 unless given, and if nothing else compares
    responses with labels, the data needs no labels.
    """

    function_weights: list[float] = field(default_factory=list)
    """Weights of reward.functions, in their order; empty: 1 each."""

    environment: dict[str, float] = field(default_factory=dict)
    """Weights of the rewards that the environment returns, by name; one that is not listed has
    weight 1.
    """

    custom: dict[str, RewardPart] = field(default_factory=dict)
    """Reward components of your own, by type, from `plugins`: {my_part: {weight: 1}}."""

    @staticmethod
    def built_in() -> tuple[str, ...]:
        """Returns the names of the built-in components, each of which is an option with a weight."""
        return (
            *("exact_match", "format", "math", "multiple_choice", "code", "task_library"),
            *("remote", "judge"),
        )

    def parts(self) -> tuple[str, ...]:
        """Returns the names of all reward components, user-defined ones last."""
        return (*self.built_in(), *self.function_names(), *self.custom)

    def function_names(self) -> list[str]:
        """Returns the names under which the scores of reward.functions are reported."""
        return [name_of(reference) for reference in self.functions]

    def scoring_models(self) -> dict[str, ScoringModel]:
        """Returns the value models that score completions, by the model's name in the run."""
        named = {
            "reward_model": ScoringModel("model", self.model, self.model_path, "reward.model_path"),
            "cost_model": ScoringModel("cost", -self.cost, self.cost_path, "reward.cost_path"),
        }
        return {name: model for name, model in named.items() if model.weight}

    @property
    def reads_columns(self) -> bool:
        """Returns whether any reward component reads the columns of the data set."""
        return bool(self.functions or self.custom or self.used() & {"judge", "task_library"})

    def weights(self) -> dict[str, float]:
        """Returns component -> weight for a config without reward.recipe."""
        own = {name: part.weight for name, part in self.custom.items()}
        functions = zip(
            self.function_names(),
            self.function_weights or [1.0] * len(self.functions),
            strict=False,
        )
        return {name: getattr(self, name) for name in self.built_in()} | dict(functions) | own

    def weight_in(self, kind: str, component: str) -> float:
        """Returns the weight of a component in the reward of prompts of the task type `kind`. A
        name that no option defines is that of an environment's own reward, whose weight is in
        reward.environment (1 by default).
        """
        own = self.recipe.get(kind, {}) if self.recipe else self.weights()
        scores = {each.component: each.weight for each in self.scoring_models().values()}
        found = own.get(component, scores.get(component))
        if found is not None:
            return found
        if component in {"exact_match", *self.used()} or component.endswith("_undecided"):
            return 0.0
        return self.environment.get(component, 1.0)

    def used(self) -> set[str]:
        """Returns the names of the components with a weight for at least one task type."""
        weights = self.recipe.values() if self.recipe else [self.weights()]
        return {name for given in weights for name, weight in given.items() if weight}

    def in_every_completion(self) -> set[str]:
        """Returns the names of the components that score every completion, whatever its prompt's
        task type.
        """
        kinds = [
            {name for name, weight in given.items() if weight} for given in self.recipe.values()
        ] or [self.used()]
        return {"exact_match", *set.intersection(*kinds)}


@dataclass
class CriticConfig:
    path: str = ""
    """Hugging Face folder of the critic: a reward model's, or a policy's (its value head then
    starts at 0); empty: model.path.
    """

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Parallel layout of the critic, with the options of parallel.*, which are also the defaults:
    critic.parallel.tensor=1.
    """

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer of the critic, with the options of optimizer.*, which are also the defaults."""

    warmup_steps: NotNegativeInt = 0
    """Initial steps in which only the critic is trained."""

    value_clip: NotNegative = 0.0
    """Maximum change of a value within the updates of one rollout (PPO's value clipping); 0:
    unlimited.
    """

    value_huber: NotNegative = 0.0
    """Error beyond which the value loss is linear instead of squared (Huber loss); 0: always
    squared.
    """


@dataclass
class FaultsConfig:
    max_restarts: NotNegativeInt = 0
    """For runs with --processes: maximum number of restarts of all processes, from the latest
    checkpoint, after one died. torchrun has its own option.
    """

    requeue_code: int = 75
    """Exit code of a run that saved a checkpoint after SIGTERM or SIGUSR1; started again, it
    resumes.
    """

    watchdog_seconds: NotNegative = 0.0
    """Watchdog timeout: a process without progress for this long prints its stack and exits, so
    that the run can be started again; 0: no watchdog.
    """

    check_replicas_every: NotNegativeInt = 0
    """Steps between comparisons of the weights that data-parallel processes hold copies of, to find
    faulty memory or devices; 0: none. If copies differ, the run ends with code 1 before it saves.
    """

    max_skipped_steps: Count = 3
    """Number of consecutive steps without an optimizer step, because no gradient was finite, after
    which the run ends as diverged.
    """

    engine_restarts: NotNegativeInt = 2
    """Maximum restarts per generation phase of engines that die, fail or hang, to finish the
    remaining completions.
    """

    rollout_repeats: NotNegativeInt = 2
    """Maximum repetitions of a rollout, from its first turn, after a failure outside the model,
    such as of a tool's server; after that the rollout is left out.
    """


@dataclass
class TrainerConfig:
    steps: Count = 100
    """Number of training steps: rollouts, or batches of supervised or preference data."""

    prompts_per_step: Count = 16
    """Prompts per rollout; for supervised and preference data, examples or pairs per step."""

    max_staleness: NotNegativeInt = 0
    """Maximum number of policy versions that a token may be behind when it is trained on. 0:
    synchronous training, each step waits for its rollouts. Above 0, this many more batches are
    generated concurrently, each step takes the groups that finished first, and groups that would be
    older are dropped. With strategy=separate generation never stops (asynchronous training);
    colocated rollouts are interrupted, and continued in the next step (partial rollouts).
    """

    max_tokens_per_micro_batch: int = 16384
    """Maximum number of tokens per micro-batch, into which sequences are packed; a pipeline gets at
    least two micro-batches per stage, with fewer tokens.
    """

    max_attention_per_micro_batch: NotNegativeInt = 0
    """Maximum sum of squared sequence lengths per micro-batch, which bounds the cost of attention;
    0: no limit.
    """

    max_patches_per_micro_batch: NotNegativeInt = 0
    """Maximum number of image patches, or audio positions, per micro-batch in a vision tower or
    audio encoder; 0: no limit.
    """

    share_prefixes: bool = True
    """Compute tokens with which several sequences of a micro-batch begin, such as a group's prompt,
    once in scoring and update; results are the same. Where this is not supported (docs/layouts.md),
    each sequence is computed by itself.
    """

    offload: bool = True
    """Between phases, move the trainer's weights, gradients, main parameters and Adam states that
    are not needed to host memory.
    """

    eval_every: NotNegativeInt = 0
    """Steps between evaluations; 0: only before the first and after the last step."""

    eval_samples: Count = 1
    """Completions per evaluation prompt; metrics are means over all of them (mean@n)."""

    eval_temperature: NotNegative = 0.0
    """Sampling temperature of evaluation; 0: greedy."""

    eval_top_p: PositiveShare = 1.0
    """Top-p sampling in evaluation: the smallest set of tokens whose probabilities sum to this.
    (Training samples from all tokens, because the trainer scores all.)
    """

    eval_top_k: NotNegativeInt = 0
    """Top-k sampling in evaluation: at most this many of the likeliest tokens; 0: all."""

    eval_min_p: BelowOne = 0.0
    """Min-p sampling in evaluation: tokens with at least this times the largest probability."""

    eval_pass_at: list[int] = field(default_factory=list)
    """Also report pass@k (at least one of k completions is correct) for these k, at most
    eval_samples, as eval_pass_at_<k>.
    """

    eval_accuracy: str = "exact_match"
    """Reward component that is 1 or more for a correct response; it decides on pass@k, and is shown
    beside the progress.
    """

    eval_shown: NotNegativeInt = 3
    """Number of completions of each evaluation to print; wandb gets a table of up to 100. 0: neither."""

    trajectories: NotNegativeInt = 10
    """Save samples of the first, every n-th and the last step to output/trajectories (about 20 bytes
    per token), and the completions of each evaluation to output/evaluations; 0: never.
    """

    trajectories_mib: Count = 1024
    """Maximum size of output/trajectories in MiB; the oldest files are deleted first."""

    output: str = "runs/default"
    """Output folder for metrics, logs and the exported model."""

    export: bool = True
    """At the end, write the trained policy as a Hugging Face folder (output/policy) with a model
    card.
    """

    export_quantised: bool = False
    """Export the weights that are quantised in model.path (FP8 with scales, or MXFP4) in the same
    format (docs/supported_architectures.md).
    """

    push_to_hub: str = ""
    """Hub repository (org/name) to which the exported folder is uploaded after the last step;
    empty: no upload. It is created as a private one if it does not exist. HF_TOKEN authenticates
    the upload.
    """

    push_bucket_mib: Count = 256
    """Approximate size of the buckets in which weights are sent to the engine; larger if one
    tensor, or a layer's experts together, exceed it.
    """

    seed: NotNegativeInt = 0
    """Random seed of data order, sampling and initialisation."""


@dataclass
class CheckpointConfig:
    every: NotNegativeInt = 0
    """Steps between checkpoints, which hold all that is needed to resume
    (docs/training_checkpoints.md); 0: none are saved.
    """

    folder: str = ""
    """Folder of the checkpoints; empty: output/checkpoints."""

    resume: str = "auto"
    """auto (resume from the latest checkpoint in the folder, if there is one), none (start anew),
    or a checkpoint's folder.
    """

    keep: Count = 3
    """Number of newest checkpoints to keep; an older one is deleted once a newer one is complete.
    """

    keep_mib: NotNegativeInt = 0
    """Maximum total size of the kept checkpoints in MiB, though the newest is always kept; 0: no
    limit.
    """

    asynchronous: bool = True
    """Continue training while a copy of the state is written; false waits for the disk."""

    hf: bool = False
    """Also save the policy (or the reward model) in each checkpoint as a Hugging Face folder, hf/.
    """

    on_failure: Literal["stop", "warn"] = "stop"
    """If a checkpoint, metrics or trajectories cannot be written (a full disk): stop, or warn and
    continue training.
    """


@dataclass
class LoggingConfig:
    timeline: list[int] = field(default_factory=list)
    """First and last step, as [3,4], of a timeline with the spans of work of all processes, written
    to output/timeline (docs/monitoring.md).
    """

    peak_tflops: NotNegative = 0.0
    """Peak TFLOP/s of one device, in model.dtype, for mfu_score and mfu_update; 0: derived from the
    CUDA device's name, if known.
    """

    wandb: str = ""
    """Weights & Biases project to which metrics are also logged (pip install 'rftmega[wandb]';
    WANDB_MODE=offline: no network).
    """

    mlflow: str = ""
    """MLflow experiment to which metrics are also logged (pip install 'rftmega[mlflow]';
    MLFLOW_TRACKING_URI).
    """

    trackio: str = ""
    """trackio project to which metrics are also logged (pip install 'rftmega[trackio]'; `trackio
    show`).
    """

    prometheus_port: int = 0
    """Port on which the main process exposes the last step's metrics to Prometheus; 0: none."""

    prometheus_host: str = "127.0.0.1"
    """Address that this port is bound to; by default reachable from this machine only."""


@dataclass
class RunConfig:
    plugins: list[str] = field(default_factory=list)
    """Python files with components of your own (docs/algorithms.md), e.g. [my_parts.py]."""

    strategy: Literal["colocated", "separate"] = "colocated"
    """Placement of the engines: colocated (in the trainer's processes, which alternate between
    rollout and training) or separate (servers beside them, on this host or others).
    """

    backend: Literal["megatron", "fsdp"] = "megatron"
    """Training backend: megatron (Megatron-Core, in any 3D-parallel layout) or fsdp (PyTorch FSDP2,
    any decoder of transformers); docs/backends.md.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)

    environment: Annotated[
        SingleTurn | Tools | Agent | Verifiers | TextArena | OpenEnv | GivenEnvironment,
        Discriminator("type"),
    ] = field(default_factory=SingleTurn)
    """Environment that runs the rollouts: single-turn, with tools, an agent, a game, or a server of OpenEnv."""

    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def reads_columns(self) -> bool:
        """Returns whether a reward component or the environment reads the columns of the data set."""
        return self.reward.reads_columns or self.environment.type != "single_turn"

    @property
    def given_rows(self) -> int:
        """Returns the number of rows (responses) per record of a task without rollouts: 2 for
        pairs, which the loss takes together; 1 for others.
        """
        task = self.algorithm.task
        return 2 if task == "reward_model" or self.reads_pairs else 1

    @property
    def reads_pairs(self) -> bool:
        """Returns whether the run trains a policy on pairs of responses."""
        return self.algorithm.task == "preference" and not self.data.desirable_key

    @property
    def exported(self) -> str:
        """Returns the folder to which the trained model is exported."""
        name = "reward_model" if self.algorithm.task == "reward_model" else "policy"
        return f"{self.trainer.output}/{name}"

    def exports(self) -> list[str]:
        """Returns the folders of all models and adapters exported at the end of the run."""
        if not self.trainer.export:
            return []
        found = [self.exported]
        found += [f"{self.exported}_ema"] if self.algorithm.ema_beta else []
        if self.model.lora.rank:
            found += [f"{folder}_adapter" for folder in found]
        return found

    @property
    def given_completions(self) -> int:
        """Returns the number of completions of data.ptx that teachers train on in each step."""
        share = self.algorithm.on_policy_share
        chosen = self.rollout.train_samples_per_prompt or self.rollout.samples_per_prompt
        sampled = self.trainer.prompts_per_step * chosen
        return max(1, round(sampled * (1 - share) / share)) if share < 1 else 0

    @property
    def late_scoring(self) -> bool:
        """Returns whether the update's own forward pass can compute the old log-probs, so that no
        separate scoring pass is needed. This requires that nothing needs them earlier, and that the
        run takes a single update per rollout, whose forward pass equals a scoring pass.
        """
        chosen = self.algorithm
        mixed = chosen.replay.max_age or chosen.on_policy_share < 1
        one_update = chosen.steps_per_rollout == 1 and not mixed
        # the mismatch gate requests new completions then, which is impossible during an update
        asks = self.rollout.on_update == "keep"
        return (
            one_update
            and chosen.kl.placement != "reward"
            and not self.model.dropout
            and not asks
            and all(teacher.signal == "loss" for teacher in chosen.teachers)
        )
