"""Translation of LightRFT's generation requests to requests of rftmega's engines: token ids, a
temperature, and a seed for each request.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rftmega.core.sampling_seeds import request_seed
from rftmega.core.types import Completion, Rollout

# settings that have no effect at these values, and are not supported at others
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "top_p": (1, None),
    "top_k": (-1, 0, None),
    "min_p": (0, None),
    "min_tokens": (0, 1, None),
    "repetition_penalty": (1, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "stop": ((), [], None),
    "ignore_eos": (False, None),
}
OF_TEXT = (
    "skip_special_tokens",
    "include_stop_str_in_output",
    "spaces_between_special_tokens",
    "detokenize",
    "logprobs",
)


class GenerationOutput(dict[str, Any]):
    """GenerationOutput is a dict whose keys are also attributes, like LightRFT's EasyDict."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def completion_of(rollout: Rollout) -> Completion:
    """Returns the completion of a rollout with a single turn."""
    (trajectory,) = rollout.trajectories
    (version,) = rollout.versions
    begin = trajectory.prompt_length
    return Completion(
        tuple(trajectory.token_ids[begin:].tolist()),
        tuple(trajectory.logprobs[begin:].tolist()),
        "length" if trajectory.truncated else "stop",
        version,
    )


def completions(
    prompts: Sequence[Sequence[int]], completions: Sequence[Completion]
) -> list[GenerationOutput]:
    """Returns one GenerationOutput per completion: prompt and output token ids, log-probs, finish
    reason and policy version.

    `prompts`: the token ids of each completion's prompt.
    """
    return [
        GenerationOutput(
            prompt_token_ids=list(ids),
            output_token_ids=list(completion.token_ids),
            logprobs=list(completion.logprobs),
            finish_reason=completion.finish_reason,
            policy_version=completion.policy_version,
        )
        for ids, completion in zip(prompts, completions, strict=True)
    ]


def read_sampling(sampling_params: Any, *, longest: int | None) -> tuple[float, int | None]:
    """Returns (temperature, seed) of `sampling_params`, a dict or an object with the same names as
    attributes (vLLM's SamplingParams). The seed is None if it is not set.

    Raises ValueError for a setting that the engine would ignore: it samples from the whole
    distribution, and ends a completion after `longest` tokens, the limit with which it was built.
    """
    given = dict(sampling_params) if isinstance(sampling_params, Mapping) else None
    names = ("temperature", "seed", "max_tokens", "max_new_tokens", *NEUTRAL)
    found = (
        given
        if given is not None
        else {
            name: getattr(sampling_params, name) for name in names if hasattr(sampling_params, name)
        }
    )
    for name in ("max_tokens", "max_new_tokens"):
        if longest is not None and found.get(name, longest) not in (longest, None):
            raise ValueError(
                f"{name}={found[name]}, but this engine ends completions after {longest}: rollout.max_response_tokens."
            )
    for name, neutral in NEUTRAL.items():
        if name in found and found[name] not in neutral:
            raise ValueError(
                f"{name}={found[name]!r} is not offered: the trainer scores the whole distribution, at one temperature. "
                "Leave it out."
            )
    if unknown := sorted(found.keys() - {*names, *OF_TEXT}):
        raise ValueError(
            f"sampling_params has {unknown}, which no engine here reads. Known are {', '.join(names)}."
        )
    temperature, seed = found.get("temperature"), found.get("seed")
    return (1.0 if temperature is None else float(temperature)), seed


def token_lists(prompt_token_ids: Sequence[Any]) -> list[list[int]]:
    """Returns prompts as a list of token-id lists. `prompt_token_ids`: one prompt (a list of ids)
    or several.
    """
    if prompt_token_ids and isinstance(prompt_token_ids[0], int):
        return [list(prompt_token_ids)]
    return [list(ids) for ids in prompt_token_ids]


def seeds_of(source: str, first: int, count: int) -> list[int]:
    """Returns the seeds of the requests number first ... first + count - 1 of `source`, a name for
    the call that makes the requests.

    Different sources and different numbers give different seeds.
    """
    return [request_seed(source, number) for number in range(first, first + count)]
