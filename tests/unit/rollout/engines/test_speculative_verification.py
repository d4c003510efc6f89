"""Verified drafts give the tokens and log-probs that sampling one position after the other gives."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rftmega.core.errors import EngineError
from rftmega.rollout.engines.draft_counts import DraftCounts, acceptance_metrics

VOCABULARY = 32
SEEDS = (3, 4, 5, 6)


def metadata_of(rows: Sequence[int], temperature: float, generators: dict[int, Any]) -> Any:
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    greedy = temperature == 0
    none = torch.zeros(0)
    return SamplingMetadata(
        temperature=None if greedy else torch.full((len(rows),), temperature),
        all_greedy=greedy,
        all_random=not greedy,
        # each row its own
        top_p=None if greedy else torch.tensor([0.5 + 0.1 * row for row in rows]),
        top_k=None if greedy else torch.tensor([9 + row for row in rows]),
        generators=generators,
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def one_by_one(sampler: Any, logits: Sequence[Tensor], temperature: float) -> list[Any]:
    """(token, log-prob) of each position of each row, as without drafts."""
    found = []
    for row, own in enumerate(logits):
        source, drawn = generator(SEEDS[row]), []
        for at in own:
            given = metadata_of([row], temperature, {0: source})
            output = sampler(logits=at[None].clone(), sampling_metadata=given)
            score = output.logprobs_tensors.logprobs[0, 0].item()
            drawn.append((output.sampled_token_ids.item(), score))
        found.append(drawn)
    return found


def verified(sampler: Any, logits: Sequence[Tensor], drafts: Any, temperature: float) -> Any:
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    from rftmega.rollout.engines.speculative_verification import SamplingVerifier

    asked = SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu"))
    sizes = torch.tensor([len(draft) + 1 for draft in drafts])
    asked.bonus_logits_indices = sizes.cumsum(0) - 1
    generators = {row: generator(seed) for row, seed in enumerate(SEEDS)}
    given = metadata_of(range(len(drafts)), temperature, generators)
    joined = torch.cat([own[: len(draft) + 1] for own, draft in zip(logits, drafts, strict=True)])
    verifier = SamplingVerifier(sampler)
    output = verifier(asked, None, joined.clone(), given)
    tokens, scores = verifier.parse_output(
        output.sampled_token_ids, VOCABULARY, logprobs_tensors=output.logprobs_tensors
    )
    flat = [score for row in scores.logprobs for score in row]
    found = [[(token, flat.pop(0)) for token in row] for row in tokens]
    return found, verifier.counts, generators


@pytest.mark.parametrize("temperature", [0.7, 0.0])
def test_each_row_gets_the_tokens_of_its_seed_up_to_the_first_wrong_draft(
    temperature: float,
) -> None:
    from vllm.v1.sample.sampler import Sampler

    sampler = Sampler("processed_logprobs")
    torch.manual_seed(0)
    logits = [2 * torch.randn(4, VOCABULARY) for _ in SEEDS]
    right = one_by_one(sampler, logits, temperature)
    ids = [[token for token, _ in row] for row in right]
    wrong = [[(token + 1) % VOCABULARY for token in row] for row in ids]
    # the first wrong, and a placeholder; all right; the second wrong; none
    drafts = [[wrong[0][0], -1], ids[1][:3], [ids[2][0], wrong[2][1], ids[2][2]], []]
    found, counts, generators = verified(sampler, logits, drafts, temperature)
    assert found == [right[0][:1], right[1][:4], right[2][:2], right[3][:1]]
    assert counts.take(3) == [3, 2, 2, 2, 1, 1]
    if temperature:  # a generator has advanced by the tokens that its row has got
        again = generator(SEEDS[2])
        for at in logits[2][:2]:
            sampler(logits=at[None].clone(), sampling_metadata=metadata_of([2], 0.7, {0: again}))
        assert torch.equal(generators[2].get_state(), again.get_state())


def test_counts_by_position_and_begins_anew() -> None:
    counts = DraftCounts()
    counts.add(3, 2)
    counts.add(1, 1)
    counts.add(0, 0)
    assert counts.take(4) == [2, 1, 1, 0, 2, 1, 0, 0]
    assert counts.take(2) == [0, 0, 0, 0]


def test_the_acceptance_of_no_drafts_is_left_out() -> None:
    assert acceptance_metrics([4.0, 2.0, 0.0, 3.0, 1.0, 0.0]) == {
        "speculative_drafted_tokens": 6.0,
        "speculative_acceptance": pytest.approx(4 / 6),
        "speculative_acceptance_1": 0.75,
        "speculative_acceptance_2": 0.5,
    }
    assert acceptance_metrics([0.0, 0.0]) == {"speculative_drafted_tokens": 0.0}


def test_a_model_runner_with_another_verification_is_refused() -> None:
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler

    from rftmega.rollout.engines.speculative_verification import SamplingVerifier, check_installed

    sampler = Sampler("processed_logprobs")
    other = SimpleNamespace(rejection_sampler=RejectionSampler(sampler))
    for runner in (other, SimpleNamespace()):
        with pytest.raises(
            EngineError, match=r"by .* of types, so that completions depend on them"
        ):
            check_installed(runner)
    verifier = SamplingVerifier(sampler)
    verifier.counts.add(1, 0)  # of a run to warm up
    check_installed(SimpleNamespace(rejection_sampler=verifier))
    assert verifier.counts.take(1) == [0, 0]
