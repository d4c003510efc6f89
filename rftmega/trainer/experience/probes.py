"""Probes: completions that the policy samples with a teacher's prompt, whose scores gate what is
taught (arXiv:2609.02998).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from rftmega.core.ragged import Ragged
from rftmega.core.sampling_seeds import sampling_seed
from rftmega.core.types import Metrics, Prompt, Samples, Taught
from rftmega.trainer.experience.teachers import AskedTeacher

PROBED = 1_000_000  # number of a prompt's first probe; lower ones are of its completions

Probe = Callable[[Sequence[Prompt], Sequence[int], int], Samples[Ragged]]


def with_probed_gates(
    samples: Samples[Ragged], teacher: AskedTeacher, probe: Probe, *, seed: int
) -> tuple[Samples[Ragged], Metrics]:
    """Returns the samples with a gate for each prompt that the teacher teaches: the mean score of
    `teachers[].probes` completions with the teacher's prompt. Also returns metrics: the mean gate.

    `probe` returns scored completions of prompts, given with their seeds, and with the number of
    times that each prompt occurs. `seed`: of the run; the same seed and weights give the same
    probes.
    """
    number, times = teacher.number, teacher.chosen.probes
    tasks: dict[int, Prompt] = {}
    for group, prompt in zip(samples.group.tolist(), samples.prompts, strict=True):
        if prompt.teachers[number] is not None:
            tasks.setdefault(group, prompt)
    requests, seeds = [], []
    for prompt in tasks.values():
        taught = prompt.teachers[number]
        assert taught is not None
        own = replace(prompt, token_ids=taught.token_ids, images=(), teachers=())
        requests += [own] * times
        first = PROBED + number * times
        seeds += [sampling_seed(seed, prompt.task, first + each) for each in range(times)]
    gates = dict.fromkeys(tasks, -torch.inf)  # nothing is taught where all probes were lost
    if requests:
        found = probe(requests, seeds, times)
        for place, group in enumerate(tasks):
            scores = found.reward[found.group == place]
            gates[group] = float(scores.mean()) if len(scores) else -torch.inf

    def gated(group: int, prompt: Prompt) -> Prompt:
        own = [*prompt.teachers]
        if (taught := own[number]) is not None:
            own[number] = Taught(taught.token_ids, gates[group])
        return replace(prompt, teachers=tuple(own))

    prompts = list(map(gated, samples.group.tolist(), samples.prompts))
    known = [gate for gate in gates.values() if gate > -torch.inf]
    mean = sum(known) / len(known) if known else 0.0
    return replace(samples, prompts=prompts), {f"{teacher.name}_probed_reward": mean}
