"""Every option, its type, its one default and what it means.

`train_rl.py --help` prints this file's docstrings.
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
from rftmega.config.options.parts import RewardPart
from rftmega.config.options.secrecy import SecretText
from rftmega.config.user_code.functions import name_of


@dataclass
class ModelConfig:
    path: str = MISSING
    """Hugging Face folder of the policy: config.json, *.safetensors, tokenizer files. Or org/name,
    org/name@revision of the hub, which is fetched into its cache.
    """

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Training dtype: float32, bfloat16, or auto (bfloat16 on CUDA, float32 on CPU)."""

    fp8: Literal["none", "blockwise", "mxfp8"] = "none"
    """Multiply the matrices of the layers in numbers of 8 bits, with a scale a block (Transformer Engine):
    blockwise on Hopper, mxfp8 on Blackwell; weights stay bfloat16 (docs/optimizers.md).
    """

    dropout: BelowOne = 0.0
    """Dropout of hidden states and attention while learning; scoring never drops."""

    freeze_vision: bool = False
    """The tower of a model that sees or hears stays as it is; only its decoder learns."""

    lora: LoRA = field(default_factory=LoRA)

    ignore_config_fields: list[str] = field(default_factory=list)
    """Fields of config.json that transformers' class of the model knows and nothing here reads, which
    is otherwise an error: they are passed over, in every model's folder (docs/supported_architectures.md).
    """

    trust_remote_code: bool = False
    """The tokenizer may be Python code in model.path, which then runs here."""

    verify: bool = False
    """Compare the files of every Hugging Face folder that the run starts from with their checksums
    before they are read: those in its checksums.json, or the hub's own where it was downloaded with
    the hub's tools. A folder without any gets a checksums.json from the first such run.
    """


@dataclass
class ParallelConfig:
    tensor: Count = 1
    """Processes that share each layer's matrices (TP); under backend=fsdp by transformers' plan of the
    model.
    """

    pipeline: Count = 1
    """Processes that share the stack of layers (PP)."""

    sequence: bool = False
    """Split activations of tensor-parallel processes along the sequence (sequence parallelism)."""

    virtual_pipeline: Count = 1
    """Chunks of layers that each stage holds; above 1 the schedule is interleaved (VPP)."""

    first_stage_layers: NotNegativeInt = 0
    """Layers of the first pipeline stage; 0: the others' share.

    The middle stages share the rest evenly.
    """

    last_stage_layers: NotNegativeInt = 0
    """Layers of the last pipeline stage, which also holds the output head; 0: the others' share."""

    context: Count = 1
    """Processes that share the tokens of every row (context parallelism, CP), for long rows."""

    expert: Count = 1
    """Processes that share the experts of a mixture-of-experts layer (EP); taken out of the
    data-parallel ones.
    """

    expert_tensor: Count = 1
    """Processes that share each expert's matrices."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass computes again: none, selective (attention's; Megatron
    only) or full (each layer's).
    """

    replicas: Count = 1
    """Copies of the model, each sharded over its share of the processes (HSDP); backend=fsdp only."""

    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward pass, and gather them again for its
    backward pass (ZeRO-3); false keeps them between (ZeRO-2). backend=fsdp only.
    """

    cpu_offload: bool = False
    """Keep weights, gradients and optimizer on the host, and bring a layer's weights when it is
    computed; backend=fsdp only.
    """


@dataclass
class OptimizerConfig:
    name: Literal["adam", "muon"] = "adam"
    """adam; or muon (Keller Jordan 2024) for matrices and Adam for the rest, which needs the package
    emerging_optimizers (docs/optimizers.md; backend=megatron).
    """

    learning_rate: NotNegative = 1e-6
    """Peak learning rate."""

    vision_learning_rate: NotNegative = 0.0
    """That of a tower that sees or hears, on the same schedule; 0: as the rest."""

    min_learning_rate: NotNegative = 0.0
    """Learning rate at which linear and cosine schedules end."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """constant, linear or cosine, after the warm-up."""

    warmup_steps: NotNegativeInt = 0
    """Optimizer steps of linear warm-up from 0."""

    weight_decay: NotNegative = 0.01
    """Decoupled weight decay; norms and biases are exempt."""

    beta1: BelowOne = 0.9
    """Adam's decay of the first moment."""

    beta2: BelowOne = 0.95
    """Adam's decay of the second moment."""

    epsilon: Positive = 1e-8
    """Adam's epsilon."""

    states: Literal["float32", "bfloat16", "8bit"] = "float32"
    """What Adam's two moments are kept in; main parameters are float32 in any case. bfloat16 and 8bit
    (block-wise, arXiv:2110.02861) need the package torchao (docs/optimizers.md; backend=megatron).
    """

    clip_grad: NotNegative = 1.0
    """Largest global gradient norm; 0 switches clipping off."""

    distributed: bool = True
    """Shard optimizer states over the data-parallel processes, where there are several (Megatron's
    DistributedOptimizer). Muon's stay whole.
    """

    overlap_grad_reduce: bool = False
    """Reduce gradients over the data-parallel processes while the backward pass still runs."""

    overlap_param_gather: bool = False
    """Gather updated parameters while the next forward pass runs; needs optimizer.distributed and
    overlap_grad_reduce.
    """

    def shards_states(self, copies: int) -> bool:
        """Tells whether `copies` processes that hold the same parameters share the optimizer states."""
        return self.distributed and self.name == "adam" and copies > 1


@dataclass
class RolloutConfig:
    engine: Literal["vllm", "sglang", "transformers", "scripted"] = "vllm"
    """vllm (fast), sglang (servers that others start), transformers (slow and obvious, the oracle) or
    scripted (no model: seeded tokens).
    """

    tensor: Count = 1
    """Processes that share one engine; colocated engines in all: processes / this."""

    servers: Count = 1
    """vLLM servers (strategy=separate only), each of rollout.tensor processes of its own."""

    addresses: list[str] = field(default_factory=list)
    """Servers that run elsewhere, as http://10.0.0.2:8100 (`rftmega serve` starts them); none is
    started here then (strategy=separate only).
    """

    server_list: str = ""
    """File with such addresses, one a line, which is read before each push: servers join and leave
    during the run.
    """

    transport: Literal["shared_memory", "network", "disk", "checkpoint"] = "shared_memory"
    """How weights reach servers: through memory of one host; slices over a process group of trainer
    and servers; files that both see; or Hugging Face folders, for servers without this package.
    """

    listen: str = "127.0.0.1"
    """transport=network: the address of the trainer's first host that servers reach. What comes there
    asks for no key: use a network of the run's own.
    """

    weights_folder: str = ""
    """transport=disk or checkpoint: a folder that trainer and servers see under one path; empty:
    weights, in trainer.output.
    """

    tls_ca: str = ""
    """PEM file with the certificates by which servers of addresses https://... are believed; empty:
    those of the system.
    """

    samples_per_prompt: Count = 8
    """Answers a prompt: the group that GRPO normalises over."""

    train_samples_per_prompt: NotNegativeInt = 0
    """Learn from only the first so many of each prompt's answers, though all are scored and vote;
    0: all.
    """

    temperature: Positive = 1.0
    """Temperature of sampling, above 0 (evaluation has its own); the trainer scores under the same
    temperature.
    """

    stop: list[str] = field(default_factory=list)
    """Strings that end an answer, which keeps them; in evaluation, too. The model's own end of text
    ends it in any case.
    """

    max_prompt_tokens: Count = 1024
    """A longer prompt is an error (see data.too_long)."""

    max_response_tokens: Count = 1024
    """An answer is cut off here; of several turns, they and what the environment says between them,
    together.
    """

    max_running: Count = 1024
    """Rollouts of one engine that are under way at once, those that wait for a tool among them."""

    max_images: NotNegativeInt = 8
    """Images that a prompt may have, of a model that sees; waveforms, of one that hears."""

    max_videos: NotNegativeInt = 0
    """Videos that a prompt may have, of a model with a vision tower."""

    max_logprob_gap: NotNegative = 0.0
    """The run stops before it learns where the 99.9th percentile of |engine - trainer|
    log-probability is above this; 0: by dtype (docs/push.md).
    """

    mean_logprob_gap: NotNegative = 0.0
    """And where its mean is above this; 0: by dtype."""

    quantization: Literal["none", "fp8"] = "none"
    """fp8: engines compute the linear layers of attention and MLP with numbers of 8 bits and one scale a
    block of 128 x 128, made anew at each push; needs algorithm.importance_sampling (docs/push.md).
    """

    router_replay: Literal["none", "trainer", "engine"] = "none"
    """Of a mixture, the experts that tokens are sent to in an update: those that the trainer's router
    chooses then; that it chose when the rollout was scored; or that the engine's chose
    (docs/moe.md).
    """

    memory_fraction: PositiveBelowOne = 0.5
    """Share of the GPU's memory that the engine may take (CUDA only)."""

    cpu_cache_gib: Positive = 0.25
    """KV cache of one engine in GiB (CPU only)."""

    max_batch: Count = 256
    """Answers that one engine generates side by side."""

    ahead: AtMostOne = 0
    """Batches that are rolled out while the one before is learnt from, and finished before the
    weights are pushed (strategy=separate): the same numbers in every run, one version behind.
    """

    on_update: Literal["wait", "abort", "recompute", "keep"] = "recompute"
    """What new weights do to requests in flight, with trainer.max_staleness and strategy=separate: they
    finish first; are cancelled, and go on from their tokens so far; go on over a cache that the new
    weights compute; or go on over the old weights' cache, whose distribution is neither policy's.
    """

    order: str = ""
    """File trained_order.jsonl of an earlier run with trainer.max_staleness: its groups are learnt in
    its order again, and those that it dropped are dropped; empty: groups are learnt as they finish.
    """

    deadline_seconds: Positive = 3600.0
    """strategy=separate: a server that needs longer for one answer is taken for hung, and started
    again.
    """

    @property
    def max_row_tokens(self) -> int:
        """Returns the most tokens of a prompt and its answer together."""
        return self.max_prompt_tokens + self.max_response_tokens


@dataclass
class DataConfig:
    train: str = ""
    """Training data: .jsonl, .jsonl.gz, .json, .csv, .parquet or .arrow, a folder that `datasets` saved
    ("folder#train": one split of several), a data set of the hub (org/name#train), or a function of
    your own that gives dicts (my.py:rows).
    """

    sources: dict[str, float] = field(default_factory=dict)
    """Instead of data.train: several of them, each with the weight of its share, as {a.jsonl: 3,
    b.parquet: 1}.
    """

    eval: str = ""
    """Held-out prompts, in one of data.train's formats; empty: no evaluation (or data.evals)."""

    evals: dict[str, str] = field(default_factory=dict)
    """Several such files by name, e.g. data.evals.easy=FILE; metrics are then eval_easy_..., of the
    one file eval_...
    """

    ptx: str = ""
    """Given answers that are learnt beside the rewarded ones (algorithm.ptx_coef): supervised data,
    in one of these formats.
    """

    prompt_key: str = "prompt"
    """Key of the prompt: a string, or a list of chat messages. As of all keys of records, a.b is the key
    b of the object under a.
    """

    alpaca_input_key: str = ""
    """Key of text that stands behind a prompt, after an empty line; empty: input where data.prompt_key
    is instruction (Alpaca), else none.
    """

    trailing_assistant: Literal["continue", "reject"] = "continue"
    """Prompts that end with a message of the assistant: continue (answers go on with its text, as in
    TRL) or reject.
    """

    label_key: str = "label"
    """Key of what the reward compares an answer with; empty: nobody knows it (reward.majority)."""

    columns: dict[str, str] = field(default_factory=dict)
    """Further columns for rewards and environments, as {answer: reward_model.ground_truth}: a name, and
    the key of its value.
    """

    kind_key: str = "kind"
    """Key of the kind of task, which reward.recipe speaks about; a record may go without."""

    images_key: str = "images"
    """Key of a prompt's images (docs/multimodal.md): one, or a list; <image> is a place of one."""

    videos_key: str = "videos"
    """Key of a prompt's videos: one or a list of paths, of files (mp4, avi, mkv, ...) or of folders
    that have the frames as images. Their places are <video> in the prompt.
    """

    audio_key: str = "audio"
    """Key of a prompt's waveforms (WAV, FLAC): one, or a list; <audio> is a place of one."""

    video_fps: Positive = 2.0
    """Frames that are shown of a second of a video; the frames of a folder are so many a second."""

    video_frames: AtLeastTwo = 32
    """At most so many frames of a video are shown, evenly spread."""

    media_folder: str = ""
    """Folder of the paths of images, videos, waveforms; none leads out. Empty: the data file's."""

    media_hosts: list[str] = field(default_factory=list)
    """Hosts of the web from which images and videos are fetched before the run begins, each once,
    into media_folder; empty: addresses are refused.
    """

    response_key: str = "response"
    """Supervised data (data.ptx, too): key of the answer to learn (none where the prompt's chat
    messages end with it).
    """

    tools_key: str = "tools"
    """Given answers: key of the functions that the chat template is told of, as a list of OpenAI's specs
    or as its JSON text; a record may go without.
    """

    trained_turns: Literal["last", "all"] = "last"
    """Supervised data: learn the last answer of a conversation, or all of the assistant's (each turn
    with the context that it had).
    """

    chosen_key: str = "chosen"
    """Preference data: key of the better answer, or of a conversation that ends with it."""

    rejected_key: str = "rejected"
    """Preference data: key of the worse answer, or of a conversation that ends with it."""

    chat_template: bool = False
    """Apply the tokenizer's chat template to prompts given as strings, too."""

    system_prompt: str = ""
    """System message before every prompt that goes through the chat template and begins with none."""

    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """What the chat template is given besides, as {enable_thinking: false} of Qwen3."""

    chat_template_file: str = ""
    """Jinja file with a chat template to use instead of the tokenizer's own."""

    control_tokens: Literal["reject", "text", "control"] = "reject"
    """Names of the tokenizer's special tokens in the text of records, as <|im_end|>. reject: refuse
    the record; text: encode them as letters; control: as the tokens, which may end a turn.
    """

    too_long: Literal["error", "drop"] = "error"
    """error: refuse what is over rollout.max_prompt_tokens (max_response_tokens); drop: leave it
    out, with a count.
    """

    @property
    def held_out(self) -> dict[str, str]:
        """Returns name -> file of held-out prompts; the one of data.eval has no name."""
        return ({"": self.eval} if self.eval else {}) | self.evals


@dataclass
class ShapingConfig:
    normalise: bool = False
    """Take the mean of all the run's rewards off a reward, and divide by their deviation."""

    clip: NotNegative = 0.0
    """Clip rewards to +- this, after all else; 0: not."""

    overlong_buffer_share: Share = 0.0
    """Lower an answer's reward over this last share of rollout.max_response_tokens (DAPO's overlong
    buffer); 0: do not.
    """

    overlong_penalty_factor: NotNegative = 1.0
    """By so much at the very end."""


@dataclass
class RewardConfig:
    exact_match: float = 1.0
    """Weight of: the answer equals the label (surrounding white space aside). Where it is not given
    it is 0 beside functions, and beside math, multiple_choice or code, which judge the same.
    """

    answer_pattern: str = ""
    """Regular expression: its last match in a response (the first group, where it has one) is the
    answer that exact_match and majority compare; without a match there is none. Empty: the whole
    response.
    """

    reasoning_markers: list[str] = field(default_factory=list)
    """The two texts that a model's reasoning stands between, as [<scratch>, </scratch>]. Reasoning
    is removed before an answer is graded, and an answer that does not finish it scores 0; format
    and functions of your own see it. Empty: those of the chat template, and <think>.
    """

    format: float = 0.0
    """Weight of: the answer matches format_pattern from start to end."""

    format_pattern: str = ""
    """Regular expression for the format reward; sees the response only."""

    math: float = 0.0
    """Weight of: the answer's last expression equals the label's mathematically (math-verify)."""

    math_seconds: Positive = 5.0
    """An expression that takes longer than this to read and compare scores 0."""

    multiple_choice: float = 0.0
    """Weight of: the answer settles on the label's letter."""

    code: float = 0.0
    """Weight of: the answer's Python passes the label's tests, in a sandbox (docs/rewards.md)."""

    code_seconds: Positive = 10.0
    """Wall-clock limit of one answer's tests, all of them together."""

    code_memory_mib: Count = 1024
    """Address space that a tested process may take."""

    code_tests_inside: bool = False
    """Run a label's tests in the answer's own interpreter, as tests need that give the answer
    functions or objects of their own; an answer written for it can then forge their outcome
    (docs/rewards.md).
    """

    timeout: Positive = 1800.0
    """Seconds that the reward may take for answers that finished together; a run whose reward takes
    longer ends.
    """

    workers: Count = 2
    """Answers that the math part, and the code part, score side by side, each in a process of its
    own.
    """

    remote: float = 0.0
    """Weight of: the number that remote_url answers with."""

    remote_url: SecretText = ""
    """Address that prompts, responses, labels and kinds are posted to as JSON; the answer is
    {"rewards": [float, ...]}.
    """

    remote_timeout: Positive = 30.0
    """Seconds that one request may take."""

    remote_retries: NotNegativeInt = 4
    """Further attempts after a lost connection, a time-out, status 429 or 5xx; the pause before
    each doubles.
    """

    remote_batch: Count = 64
    """Answers a request, at most."""

    judge: float = 0.0
    """Weight of: what a language model at judge_url says of the answer, from 0 to 1
    (docs/rewards.md).
    """

    judge_url: str = ""
    """Address of an API like OpenAI's: https://host/v1, or that of its chat completions."""

    judge_model: str = ""
    """Name of the model that judges, as the API knows it."""

    judge_key_env: str = ""
    """Environment variable that holds the API's key, on every host; empty: none is sent."""

    judge_template: str = ""
    """Question to the judge, with {prompt}, {completion}, {label} and {messages}: text, or a file
    that ends in .txt or .md; empty: one that asks for a score from 0 to 10.
    """

    judge_pattern: str = r"(?i)score[\s*:=]{0,9}(-?\d+(?:\.\d+)?)"
    """Regular expression: its last match in what the judge says (the first group, where it has one)
    is the number. Without one the answer is undecided.
    """

    judge_scale: list[float] = field(default_factory=lambda: [0.0, 10.0])
    """Worst and best number of the judge, which become 0 and 1; others are undecided."""

    judge_temperature: NotNegative = 0.0
    """Temperature that the judge is asked at."""

    judge_max_tokens: Count = 1024
    """Tokens that the judge may say."""

    judge_timeout: Positive = 60.0
    """Seconds that one request to the judge may take."""

    judge_retries: NotNegativeInt = 6
    """Further attempts after a lost connection, a time-out, status 429 or 5xx; the pause before
    each doubles, or is what the server asks for (Retry-After).
    """

    judge_per_second: NotNegative = 0.0
    """Requests that a process may begin in a second; 0: any number."""

    judge_concurrency: Count = 8
    """Requests of a process that may be under way at once."""

    judge_cache: str = ""
    """File that keeps what the judge said, so that no run asks the same again; empty: in memory
    only.
    """

    model: float = 0.0
    """Weight of: a reward model's score (algorithm.task=reward_model makes one), in the policy's
    layout and vocabulary.
    """

    model_path: str = ""
    """Hugging Face folder of the reward model, a sequence classifier with one label."""

    majority: bool = False
    """Learn from the majority of a prompt's answers instead of labels (TTRL); the weights are for
    evaluation only.
    """

    recipe: dict[str, dict[str, float]] = field(default_factory=dict)
    """Weights by kind of task, {kind: {part: weight}}, in place of those above; every prompt's kind
    must be there.
    """

    shaping: ShapingConfig = field(default_factory=ShapingConfig)

    functions: list[str] = field(default_factory=list)
    """Reward functions of your own, as TRL's users write them (docs/rewards.md): [my_rewards.py:f],
    or [my_package.rewards:f]. With one exact_match is 0 unless it is given, and where nothing else
    compares answers with labels, data needs none.
    """

    function_weights: list[float] = field(default_factory=list)
    """Weights of reward.functions, in their order; empty: 1 each."""

    environment: dict[str, float] = field(default_factory=dict)
    """Weights of the rewards that the environment itself gives, by name; one that is not named here
    weighs 1.
    """

    custom: dict[str, RewardPart] = field(default_factory=dict)
    """Parts of your own, by type, from `plugins`: {my_part: {weight: 1}}."""

    @staticmethod
    def built_in() -> tuple[str, ...]:
        """Returns the options that are weights."""
        return ("exact_match", "format", "math", "multiple_choice", "code", "remote", "judge")

    def parts(self) -> tuple[str, ...]:
        """Returns the names of all parts, a user's own last."""
        return (*self.built_in(), *self.function_names(), *self.custom)

    def function_names(self) -> list[str]:
        """Returns the names of reward.functions, under which their scores are reported."""
        return [name_of(reference) for reference in self.functions]

    @property
    def reads_columns(self) -> bool:
        """Says that some part sees the columns of the data set."""
        return bool(self.functions or self.custom or "judge" in self.used())

    def weights(self) -> dict[str, float]:
        """Returns the weight of each part where there is no recipe."""
        own = {name: part.weight for name, part in self.custom.items()}
        functions = zip(
            self.function_names(),
            self.function_weights or [1.0] * len(self.functions),
            strict=False,
        )
        return {name: getattr(self, name) for name in self.built_in()} | dict(functions) | own

    def used(self) -> set[str]:
        """Returns those that some prompt is scored with."""
        weights = self.recipe.values() if self.recipe else [self.weights()]
        return {name for given in weights for name, weight in given.items() if weight}

    def in_every_completion(self) -> set[str]:
        """Returns those that every prompt is scored with, whatever its kind."""
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
    """Layout of the critic, as parallel.*, which also is the default of each option:
    critic.parallel.tensor=1.
    """

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer of the critic, as optimizer.*, which also is the default of each option."""

    warmup_steps: NotNegativeInt = 0
    """Steps at the beginning in which only the critic learns."""

    value_clip: NotNegative = 0.0
    """Largest change of a value in a rollout's updates; 0: any."""

    value_huber: NotNegative = 0.0
    """Distance of a value beyond which the loss is linear, not squared; 0: it never is."""


@dataclass
class FaultsConfig:
    max_restarts: NotNegativeInt = 0
    """--processes: times that all are started again, from the latest checkpoint, after one died.
    torchrun has its own.
    """

    requeue_code: int = 75
    """Exit code of a run that SIGTERM or SIGUSR1 stopped and that saved: started again, it goes on.
    """

    watchdog_seconds: NotNegative = 0.0
    """A process without progress for so long says where it stands and ends, so that the run can be
    started again; 0: waits.
    """

    max_skipped_steps: Count = 3
    """A run of which so many steps in a row took no optimizer step, since no gradient was finite,
    has diverged and ends.
    """

    engine_restarts: NotNegativeInt = 2
    """Times in one generation that engines which die, fail or hang are started again, to answer
    what is unanswered.
    """

    rollout_repeats: NotNegativeInt = 2
    """Times that a rollout is run again from its first turn after something that it needs, such as a
    tool's server, broke down; then it is left out.
    """


@dataclass
class TrainerConfig:
    steps: Count = 100
    """Rollouts; of given data, batches."""

    prompts_per_step: Count = 16
    """Prompts a rollout; of given data, examples or pairs a step."""

    max_staleness: NotNegativeInt = 0
    """Policy versions that a token may be behind when it is learnt from. 0: each step waits for its
    rollouts. Above 0 so many batches more are under way, each step takes the groups that finished first,
    and what would be older is dropped. With strategy=separate rollouts never stop; colocated ones are
    broken off, and go on in the next step (partial rollouts).
    """

    max_tokens_per_micro_batch: int = 16384
    """Rows are packed into micro-batches of at most this many tokens; a pipeline gets two or more a
    stage, of fewer tokens.
    """

    max_attention_per_micro_batch: NotNegativeInt = 0
    """And of at most this sum of squared row lengths, which bounds attention's work; 0: no bound.
    """

    max_patches_per_micro_batch: NotNegativeInt = 0
    """And of at most this many patches of images, or positions of sound, in a tower; 0: no bound."""

    attention_weight: NotNegative = 0.0
    """Cost of a row of n tokens is n + this x n^2 where data-parallel work is balanced."""

    patch_weight: NotNegative = 1.0
    """Cost of a patch of an image, or a position of sound, in tokens, in the same balance."""

    offload: bool = True
    """Between phases, what the trainer doesn't need (weights, gradients, main parameters, Adam)
    moves to the host.
    """

    eval_every: NotNegativeInt = 0
    """Steps between evaluations; 0: only before the first and after the last step."""

    eval_samples: Count = 1
    """Answers to each held-out prompt; metrics are means over all of them (mean@n)."""

    eval_temperature: NotNegative = 0.0
    """Temperature of these answers; 0 is greedy."""

    eval_top_p: PositiveShare = 1.0
    """They are sampled from the fewest tokens whose probabilities sum to this. (Training samples from
    all tokens, as the trainer scores all.)
    """

    eval_top_k: NotNegativeInt = 0
    """And from this many of the likeliest tokens at most; 0: from all."""

    eval_min_p: BelowOne = 0.0
    """And from tokens with at least this times the largest probability."""

    eval_pass_at: list[int] = field(default_factory=list)
    """Also pass@k for these k, at most eval_samples: is one of k answers right?

    Metrics are eval_pass_at_<k>.
    """

    eval_accuracy: str = "exact_match"
    """Part of the reward that is 1 or more where an answer is right: for pass@k, and shown beside
    the progress.
    """

    trajectories: NotNegativeInt = 10
    """Samples of the first and every n-th step go to output/trajectories (about 20 bytes a token);
    0: of none.
    """

    trajectories_mib: Count = 1024
    """Largest size of that folder; the oldest files go first."""

    output: str = "runs/default"
    """Folder for metrics, logs and the exported model."""

    export: bool = True
    """Write the trained policy as a Hugging Face folder (output/policy) at the end, with a model card."""

    export_quantised: bool = False
    """Write its weights as 8-bit numbers with scales, those that model.path has so (docs/supported_architectures.md)."""

    push_to_hub: str = ""
    """Upload that folder to this repository of the hub (org/name) after the last step; empty: nowhere.
    It is made where it isn't there, seen by nobody else. HF_TOKEN says who uploads.
    """

    push_bucket_mib: Count = 256
    """Weights travel to the engine in buckets of about this size; larger where one tensor, or a
    layer's experts together, are.
    """

    seed: NotNegativeInt = 0
    """Seed of data order, sampling and initialisation."""


@dataclass
class CheckpointConfig:
    every: NotNegativeInt = 0
    """Steps between saves of all that a run needs to go on (docs/training_checkpoints.md); 0: none
    are saved.
    """

    folder: str = ""
    """Folder that checkpoints are kept in; empty: output/checkpoints."""

    resume: str = "auto"
    """auto (go on from the latest in the folder, where there is one), none (start anew), or a
    checkpoint's folder.
    """

    keep: Count = 3
    """So many stay, the newest; an older one goes once a newer is whole."""

    keep_mib: NotNegativeInt = 0
    """And at most so much of them together, though the newest always stays; 0: no bound."""

    asynchronous: bool = True
    """Training goes on while a copy of the state is written; false waits for the disk."""

    hf: bool = False
    """Each also holds the policy (or the reward model) as a Hugging Face folder, hf/."""

    on_failure: Literal["stop", "warn"] = "stop"
    """stop, or warn and train on, when a checkpoint, metrics or trajectories can't be written (a
    full disk).
    """


@dataclass
class LoggingConfig:
    timeline: list[int] = field(default_factory=list)
    """First and last step of which all processes' work is recorded, as [3,4], in output/timeline
    (docs/monitoring.md).
    """

    peak_tflops: NotNegative = 0.0
    """Peak of a device, in model.dtype, for mfu_score and mfu_update; 0: by the name of a CUDA
    device, where it is known.
    """

    wandb: str = ""
    """Weights & Biases project that metrics go to, too (pip install 'rftmega[wandb]';
    WANDB_MODE=offline: no network).
    """

    mlflow: str = ""
    """MLflow experiment that metrics go to, too (pip install 'rftmega[mlflow]'; MLFLOW_TRACKING_URI)."""

    trackio: str = ""
    """trackio project that metrics go to, too (pip install 'rftmega[trackio]'; `trackio show`)."""

    prometheus_port: int = 0
    """Port where the main process shows the last step's metrics to Prometheus; 0: none."""

    prometheus_host: str = "127.0.0.1"
    """Address of that port: this machine's own, unless another is given."""


@dataclass
class RunConfig:
    plugins: list[str] = field(default_factory=list)
    """Python files with parts of your own (docs/algorithms.md), e.g. [my_parts.py]."""

    strategy: Literal["colocated", "separate"] = "colocated"
    """colocated (engines in the trainer's processes, by turns) or separate (servers beside
    them, on this host or others).
    """

    backend: Literal["megatron", "fsdp"] = "megatron"
    """What models are built and trained on: megatron (Megatron-Core, in any 3D-parallel layout) or
    fsdp (torch's FSDP2, any decoder of transformers); docs/backends.md.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)

    environment: Annotated[
        SingleTurn | Tools | Agent | Verifiers | GivenEnvironment, Discriminator("type")
    ] = field(default_factory=SingleTurn)
    """What stands between a task and the model: how a rollout goes."""

    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def reads_columns(self) -> bool:
        """Says that a reward or the environment sees the columns of the data set."""
        return self.reward.reads_columns or self.environment.type != "single_turn"

    @property
    def exported(self) -> str:
        """Returns the folder that the trained model is written to."""
        name = "reward_model" if self.algorithm.task == "reward_model" else "policy"
        return f"{self.trainer.output}/{name}"

    def exports(self) -> list[str]:
        """Returns the folders that the end of the run writes models and adapters to."""
        if not self.trainer.export:
            return []
        found = [self.exported]
        found += [f"{self.exported}_ema"] if self.algorithm.ema_beta else []
        if self.model.lora.rank:
            found += [f"{folder}_adapter" for folder in found]
        return found

    @property
    def late_scoring(self) -> bool:
        """Says that the update's own forward pass can give the log-probs before it: nothing needs
        them earlier, and there is one update, which computes as a scoring pass would.
        """
        chosen = self.algorithm
        one_update = chosen.steps_per_rollout == 1 and not chosen.replay.max_age
        # the gate asks for new answers then, which an update that is under way can't bear
        asks = self.rollout.on_update == "keep"
        return (
            one_update and chosen.kl.placement != "reward" and not self.model.dropout and not asks
        )
