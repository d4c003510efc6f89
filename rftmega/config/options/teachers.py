"""Options of distillation: the models that teach the policy."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rftmega.config.options.bounds import (
    Count,
    NotNegativeInt,
    Positive,
    PositiveBelowOne,
    Share,
)
from rftmega.config.options.parallel import ParallelConfig

SELF = "self"  # as path: the policy


@dataclass
class Teacher:
    """A teacher of the policy, with the policy's tokenizer."""

    path: str = ""
    """Hugging Face folder or Hub model of the teacher; self: the policy itself, which then needs
    `prompt`.
    """

    addresses: list[str] = field(default_factory=list)
    """Addresses of vLLM servers that hold the teacher, instead of a path, such as
    [http://node7:8000]; with vocabulary top_k or sampled.
    """

    key_env: str = ""
    """Environment variable with the key of `addresses`, sent as a bearer token; empty: none."""

    name: str = ""
    """Name in metrics and messages; empty: teacher, or teacher_2 for the second one."""

    signal: Literal["loss", "advantage"] = "loss"
    """Use of the teacher: loss adds `weight` times the divergence per token to the policy loss;
    advantage subtracts `weight` times the log-ratio of policy and teacher from the advantage of
    each sampled token.
    """

    weight: Positive = 1.0
    """Weight of the divergence in the loss, or of the log-ratio in the advantage."""

    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """Divergence per token: reverse_kl is KL(policy || teacher), forward_kl is KL(teacher ||
    policy), jsd the generalised Jensen-Shannon divergence of GKD.
    """

    beta: PositiveBelowOne = 0.5
    """Weight of the teacher in the mixture of jsd; towards 0 it resembles forward_kl, towards 1
    reverse_kl.
    """

    vocabulary: Literal["full", "top_k", "sampled"] = "full"
    """Tokens over which the divergence is computed: full (all of the vocabulary), top_k (the
    teacher's likeliest ones, and all others together) or sampled (the sampled token, an estimate).
    """

    top_k: Count = 64
    """Number of the teacher's likeliest tokens with vocabulary=top_k."""

    discount: Share = 0.0
    """With signal=advantage: discount factor per token, with which the log-ratios of later tokens
    count for a token; 0: only its own.
    """

    when: dict[str, str] = field(default_factory=dict)
    """Columns of the data set with the values that select the prompts that this teacher teaches,
    such as {domain: math}; empty: all prompts.
    """

    prompt: str = ""
    """Column with the teacher's own prompt (text or messages), which may contain more than the
    policy's, such as a solution; empty: the policy's prompt.
    """

    gate: str = ""
    """Column with the teacher's mean score on the prompt (rftmega evaluate --keep); a prompt is
    taught only if this is higher than the mean reward of its completions. Empty: no gate.
    """

    probes: NotNegativeInt = 0
    """With path=self: number of completions per step and prompt that the policy samples with this
    teacher's prompt, whose mean reward is the gate; 0: none.
    """

    backend: Literal["auto", "megatron", "fsdp"] = "auto"
    """Backend that computes the teacher; auto: the run's. fsdp takes any decoder of transformers,
    megatron has pipeline, context and expert parallelism.
    """

    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    @property
    def is_self(self) -> bool:
        return self.path == SELF

    @property
    def reads_columns(self) -> bool:
        """Returns whether the records of the training data say what the teacher teaches."""
        return bool(self.when or self.prompt or self.gate)

    @property
    def loads(self) -> bool:
        """Returns whether the run itself builds and holds the teacher."""
        return bool(self.path) and not self.is_self


def names_of(teachers: Sequence[Teacher]) -> list[str]:
    """Returns the name of each teacher in metrics and messages."""
    plain = ["teacher", *[f"teacher_{number}" for number in range(2, len(teachers) + 1)]]
    return [teacher.name or name for teacher, name in zip(teachers, plain, strict=False)]
