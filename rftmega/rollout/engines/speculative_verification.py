"""Verification of drafted tokens in speculative decoding (arXiv:2211.17192), in vLLM's sampler.

vLLM accepts a drafted token with a probability, and draws another one from a corrected distribution
otherwise. The result has the right distribution, but depends on the drafts as well as on the seed.
Here each position is sampled as without drafts, from the request's own random generator, and a
draft is accepted up to the first token that differs from the sampled one. For drafts that are not
sampled themselves, as many are accepted as by vLLM's rule. Completions are those without
speculation, whatever was drafted, up to rounding of logits.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from vllm.v1.spec_decode import draft_model
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from rftmega.core.errors import EngineError
from rftmega.rollout.engines.draft_counts import DraftCounts
from rftmega.rollout.engines.draft_model import DraftModelFromFolder

RUNNER = "vllm.v1.worker.gpu_model_runner"


class SamplingVerifier(RejectionSampler):
    """SamplingVerifier samples a token at each drafted position, and accepts the tokens of a draft
    up to the first one that differs from the sampled token, which replaces it.
    """

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        self.counts = DraftCounts()

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: Tensor | None,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Returns the tokens of this step for each of the R requests: [R, longest draft + 1], with
        -1 after a request's last token; and their log-probs, a row for each element of that tensor.

        `logits`: [drafted tokens + R, vocabulary], all positions of the first request, then those
        of the second. `draft_probs` are not needed.
        """
        drafts = _split(metadata.draft_token_ids.tolist(), metadata.num_draft_tokens)
        ends = metadata.bonus_logits_indices.tolist()
        begins = [end - len(draft) for end, draft in zip(ends, drafts, strict=True)]
        width = metadata.max_spec_len + 1
        sampled = logits.new_full((len(drafts), width), PLACEHOLDER_TOKEN_ID, dtype=torch.int32)
        scores = _Scores(len(drafts), width)
        rows = list(range(len(drafts)))  # whose drafts agree so far
        for position in range(width):
            output = self.sampler(
                logits=logits[[begins[row] + position for row in rows]],
                sampling_metadata=_restricted(sampling_metadata, rows, len(drafts)),
            )
            found = output.sampled_token_ids[:, 0]
            sampled[rows, position] = found
            scores.store(rows, position, output.logprobs_tensors)
            agreeing = []
            for row, token in zip(rows, found.tolist(), strict=True):
                if drafts[row][position : position + 1] == [token]:
                    agreeing.append(row)
                else:
                    # -1: a placeholder, by which vLLM fills up a batch for a CUDA graph
                    self.counts.add(sum(token >= 0 for token in drafts[row]), position)
            rows = agreeing
            if not rows:
                break
        return SamplerOutput(sampled_token_ids=sampled, logprobs_tensors=scores.flat())


class _Scores:
    """_Scores collects vLLM's log-prob tensors of a step's positions."""

    def __init__(self, rows: int, width: int):
        self._shape = rows, width
        self._stored: list[Tensor] | None = None

    def store(self, rows: Sequence[int], position: int, found: LogprobsTensors | None) -> None:
        """Stores the tensors of `rows` at a position; None if no request has log-probs."""
        if found is None:
            return
        parts = [found.logprob_token_ids, found.logprobs, found.selected_token_ranks]
        if self._stored is None:
            self._stored = [part.new_zeros(*self._shape, *part.shape[1:]) for part in parts]
        for stored, part in zip(self._stored, parts, strict=True):
            stored[rows, position] = part

    def flat(self) -> LogprobsTensors | None:
        """Returns the tensors with one row per request and position."""
        if self._stored is None:
            return None
        token_ids, logprobs, ranks = (stored.flatten(0, 1) for stored in self._stored)
        return LogprobsTensors(token_ids, logprobs, ranks)


def _split(tokens: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Returns `tokens` as consecutive lists of the given lengths."""
    given = iter(tokens)
    return [[next(given) for _ in range(length)] for length in lengths]


def _restricted(sampling: SamplingMetadata, rows: Sequence[int], batch: int) -> SamplingMetadata:
    """Returns the sampling metadata of some `rows`, in ascending order, of `batch` rows."""
    if len(rows) == batch:
        return sampling

    def chosen(values: Any) -> Any:
        return None if values is None else values[rows]

    generators = {
        place: sampling.generators[row]
        for place, row in enumerate(rows)
        if row in sampling.generators
    }
    return replace(
        sampling,
        temperature=chosen(sampling.temperature),
        top_p=chosen(sampling.top_p),
        top_k=chosen(sampling.top_k),
        generators=generators,
        # requests of a run have none of these
        logitsprocs=LogitsProcessors(),
    )


def install() -> None:
    """Makes vLLM verify drafts by SamplingVerifier, and load draft models from their folders, in
    engines that this process builds later.
    """
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # which takes neither
    vars(rejection_sampler)["RejectionSampler"] = SamplingVerifier
    vars(draft_model)["DraftModelProposer"] = DraftModelFromFolder
    if runner := sys.modules.get(RUNNER):  # it has taken the classes when it was imported
        vars(runner)["RejectionSampler"] = SamplingVerifier
        vars(runner)["DraftModelProposer"] = DraftModelFromFolder


def check_installed(runner: Any) -> None:
    """Raises EngineError if vLLM's model runner verifies drafts in another way; else forgets the
    drafts that it has verified to warm up.
    """
    verifier = getattr(runner, "rejection_sampler", None)
    if not isinstance(verifier, SamplingVerifier):
        raise EngineError(
            f"vLLM would verify drafts by {type(verifier).__name__} of {type(runner).__module__}, so that completions depend on "
            "them. Set rollout.speculative=none."
        )
    verifier.counts.take(0)
