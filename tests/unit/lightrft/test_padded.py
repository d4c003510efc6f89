import inspect
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rftmega.core import types
from rftmega.core.types import Rows
from rftmega.lightrft import padded_experience
from rftmega.lightrft.padded_experience import (
    BEHAVIOUR,
    Experience,
    Samples,
    per_action,
    per_target,
)

PAD = 2  # the stop token's id too, and a word inside responses
PROMPTS = [[5, 6, PAD], [7], [PAD, PAD, 8, 9]]
RESPONSES = [[PAD, 4, PAD], [1, 3, 3, 3], []]
LENGTHS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=5)


def rows_of(prompts: list[list[int]], responses: list[list[int]]) -> Rows:
    both = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    width = max(map(len, both))
    return Rows.of_completions(
        torch.tensor([ids + [0] * (width - len(ids)) for ids in both]),
        torch.tensor([len(prompt) for prompt in prompts]),
        torch.tensor([len(ids) for ids in both]),
    )


def drawn(lengths: list[tuple[int, int]], seed: int = 0) -> Rows:
    random = torch.Generator().manual_seed(seed)

    def words(number: int) -> list[int]:
        return torch.randint(0, 4, (number,), generator=random).tolist()

    return rows_of([words(p) for p, _ in lengths], [words(r) for _, r in lengths])


def samples(rows: Rows) -> Samples:
    return Samples.of(rows, prompts=["?"] * len(rows), labels=["!"] * len(rows), pad_id=PAD)


def assert_same(found: Any, expected: Any) -> None:
    for each in fields(expected):
        one, other = getattr(found, each.name), getattr(expected, each.name)
        if isinstance(other, Tensor):
            assert one.dtype == other.dtype, each.name
            assert one.tolist() == other.tolist(), each.name
        else:
            assert one == other, each.name


def test_constructors_take_what_users_of_lightrft_give_in_their_order() -> None:
    assert " ".join(inspect.signature(Experience).parameters) == (
        "sequences action_log_probs base_action_log_probs values returns advantages attention_mask action_mask info "
        "kl action_entropy pixel_values image_grid_thw pixel_values_videos video_grid_thw images"
    )
    assert " ".join(inspect.signature(Samples).parameters) == (
        "sequences attention_mask action_mask num_actions packed_seq_lens response_length total_length prompts labels pad_len "
        "pixel_values image_grid_thw pixel_values_videos video_grid_thw images"
    )


def test_prompts_end_and_responses_begin_in_one_column_and_masks_know_a_word_from_padding() -> None:
    found = samples(rows_of(PROMPTS, RESPONSES))
    assert found.sequences.tolist() == [
        [PAD, 5, 6, PAD, PAD, 4, PAD, PAD],
        [PAD, PAD, PAD, 7, 1, 3, 3, 3],
        [PAD, PAD, 8, 9, PAD, PAD, PAD, PAD],
    ]
    assert found.attention_mask.int().tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 0],
        [0, 0, 0, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 0, 0, 0, 0],
    ]
    assert found.action_mask is not None
    assert found.action_mask.int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    assert found.num_actions == 4
    assert found.packed_seq_lens is None
    assert found.response_length.tolist() == [3, 4, 0]
    assert found.total_length.tolist() == [6, 5, 4]


def test_packed_answers_stand_behind_each_other_without_padding_but_at_the_end() -> None:
    found = samples(rows_of(PROMPTS, RESPONSES)).packed(pad_len=2, pad_id=9)
    tokens = [
        token
        for prompt, response in zip(PROMPTS, RESPONSES, strict=True)
        for token in prompt + response
    ]
    assert found.sequences.tolist() == [[*tokens, 9, 9]]
    assert found.attention_mask.tolist() == [[1] * 6 + [2] * 5 + [3] * 4 + [0] * 2]
    assert found.action_mask is None
    assert isinstance(found.num_actions, Tensor)
    assert found.num_actions.tolist() == [3, 4, 0]
    assert found.packed_seq_lens is not None
    assert found.packed_seq_lens.tolist() == [6, 5, 4]
    assert found.pad_len == 2


@settings(max_examples=30)
@given(LENGTHS, st.integers(0, 3), st.integers(0, 100))
def test_both_layouts_and_rows_lead_back_to_each_other(
    lengths: list[tuple[int, int]], pad_len: int, seed: int
) -> None:
    rows = drawn(lengths, seed)
    batched = samples(rows)
    batched.group = torch.arange(len(rows))
    packed = batched.packed(pad_len=pad_len)
    assert_same(packed.batched(pad_id=PAD), batched)
    assert_same(packed.batched(pad_id=PAD).packed(pad_len=pad_len), packed)
    assert_same(batched.rows(), rows)
    assert_same(packed.rows(), rows)


def test_a_mask_that_leaves_out_tokens_of_a_response_is_refused_rather_than_forgotten() -> None:
    found = samples(rows_of(PROMPTS, RESPONSES))
    assert found.action_mask is not None
    found.action_mask[0, 1] = False
    with pytest.raises(ValueError, match=r"action_mask of row\(s\) \[0\]"):
        found.packed()


@settings(max_examples=30)
@given(LENGTHS)
def test_per_token_tensors_speak_of_the_same_tokens_in_both_alignments(
    lengths: list[tuple[int, int]],
) -> None:
    rows = drawn(lengths)
    targets = rows.tokens[:, 1:].float()  # what a column of rftmega speaks about
    actions = per_action(targets, rows)
    canvas = samples(rows)
    assert isinstance(canvas.num_actions, int)
    prompts = canvas.sequences.shape[1] - canvas.num_actions
    assert canvas.action_mask is not None
    torch.testing.assert_close(
        actions, torch.where(canvas.action_mask, canvas.sequences[:, prompts:].float(), 0.0)
    )
    torch.testing.assert_close(per_target(actions, rows), torch.where(rows.mask, targets, 0.0))


def test_an_empty_prompt_predicts_nothing_and_is_refused() -> None:
    rows = rows_of([[1], []], [[2], [3]])
    with pytest.raises(ValueError, match="Row 1 has an empty prompt"):
        per_action(torch.zeros(2, 1), rows)
    assert_same(samples(rows).packed().rows(), rows)  # tokens alone are no trouble


def own_experience(rows: Rows, *, reference: bool) -> types.Experience:
    random = torch.Generator().manual_seed(1)
    mask = rows.mask.clone()
    mask[:, ::3] = False  # as between the turns of a conversation

    def masked() -> Tensor:
        return torch.where(rows.mask, torch.randn(rows.mask.shape, generator=random), 0.0)

    logp, optional = [masked(), masked()], [masked() if reference else None for _ in range(4)]
    return types.Experience(
        rows.tokens,
        rows.prompt_lengths,
        rows.lengths,
        mask,
        *logp,
        optional[0],
        masked(),
        *optional[1:],
    )


@pytest.mark.parametrize("reference", [True, False])
def test_an_experience_and_its_canvas_lead_back_to_each_other(reference: bool) -> None:
    own = own_experience(drawn([(3, 4), (1, 5), (5, 0)]), reference=reference)
    canvas = padded_experience.of_experience(own.ragged(), pad_id=PAD)
    assert canvas.attention_mask is not None
    assert canvas.sequences.shape == canvas.attention_mask.shape == (3, 10)
    assert canvas.action_log_probs.shape == (3, 5)
    assert_same(padded_experience.to_experience(canvas), own)


def test_without_the_engines_log_probs_the_trainers_stand_in() -> None:
    canvas = padded_experience.of_experience(own_experience(drawn([(2, 3)]), reference=False))
    canvas.info = None
    found = padded_experience.to_experience(canvas)
    assert found.behaviour_logp.tolist() == found.old_logp.tolist()


def test_an_experience_without_advantages_teaches_nothing_and_is_refused() -> None:
    canvas = padded_experience.of_experience(own_experience(drawn([(2, 3)]), reference=False))
    canvas.advantages = None
    with pytest.raises(ValueError, match="has no advantages"):
        padded_experience.to_experience(canvas)


NO_TENSORS = ("info", "images")


def full_experience() -> Experience:
    tensors = {f.name: torch.zeros(2, 3) for f in fields(Experience) if f.name not in NO_TENSORS}
    return Experience(
        **tensors,
        info={"reward": torch.ones(2), "parts": [torch.ones(1), torch.ones(1)], "note": "kept"},
    )


def tensors_of(experience: Experience) -> list[Tensor]:
    assert experience.info is not None
    own = [getattr(experience, f.name) for f in fields(experience) if f.name not in NO_TENSORS]
    return [*own, experience.info["reward"], *experience.info["parts"]]


def test_every_tensor_moves_to_a_device() -> None:
    experience = full_experience()
    assert experience.to_device("meta") is experience
    assert [x.device.type for x in tensors_of(experience)] == ["meta"] * 17
    assert experience.info is not None
    assert experience.info["note"] == "kept"


def test_every_tensor_is_pinned_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    pinned: list[int] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: pinned.append(id(self)) or self)
    experience = full_experience()
    experience.kl = None
    assert experience.pin_memory() is experience
    assert sorted(pinned) == sorted(id(x) for x in tensors_of(experience) if x is not None)
    assert len(pinned) == 16


def test_without_a_device_pinning_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    tensors = [torch.ones(1), torch.ones(2)]
    assert padded_experience.pin_memory(tensors) is tensors
    assert padded_experience.pin_memory(tensors[0]) is tensors[0]


def test_lists_of_tensors_move_as_tensors_do() -> None:
    assert [
        x.device.type for x in padded_experience.to([torch.ones(1), torch.ones(2)], "meta")
    ] == ["meta", "meta"]
    assert padded_experience.to(torch.ones(1), "meta").device.type == "meta"


def test_the_engines_log_probs_travel_in_info() -> None:
    own = own_experience(drawn([(2, 3)]), reference=False)
    info = padded_experience.of_experience(own).info
    assert info is not None
    assert info[BEHAVIOUR].tolist() == own.behaviour_logp[:, 1:].tolist()
