import base64
import io
import json
from dataclasses import asdict, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rftmega.checkpoints.state_split import joined, put_together, taken_apart
from rftmega.core.media_positions import PlacedImage, RowImages
from rftmega.core.ragged import Ragged
from rftmega.core.types import Completion, Experience, Prompt, Rows, Samples
from rftmega.lightrft.strategy import StrategyBase
from rftmega.trainer.experience import ReplayBuffer, collect
from tests.rollouts import rollout_of


def experience_of(*completions: tuple[int, int], version: int = 0) -> Experience[Ragged]:
    """Rows of (token, length of the answer) after a prompt of two."""
    longest = max(length for _, length in completions)
    tokens = torch.zeros(len(completions), 2 + longest, dtype=torch.int64)
    for row, (token, length) in enumerate(completions):
        tokens[row, : 2 + length] = token
    lengths = torch.tensor([2 + length for _, length in completions])
    rows = Rows.of_completions(tokens, torch.full((len(completions),), 2), lengths)
    logp = torch.where(rows.mask, -tokens[:, 1:].float(), 0.0)
    versions = torch.where(rows.mask, version, -1)
    return Experience(
        tokens,
        rows.prompt_lengths,
        lengths,
        rows.mask,
        logp,
        2 * logp,
        None,
        3 * logp,
        versions=versions,
    ).ragged()


def first_tokens(buffer: ReplayBuffer) -> list[int]:
    return [int(buffer[row].tokens[0][0]) for row in range(len(buffer))]


def same(one: Any, other: Any) -> bool:
    one, other = one.padded(), other.padded()
    pairs = [
        (getattr(one, f.name), getattr(other, f.name))
        for f in fields(Experience)
        if not f.name.startswith("teacher")
    ]
    for name in ("teacher_logp", "teacher_prompts"):
        ours, theirs = getattr(one, name), getattr(other, name)
        assert ours.keys() == theirs.keys()
        pairs += [(ours[key], theirs[key]) for key in ours]
    pairs = [(a.padded(), b.padded()) if isinstance(a, Ragged) else (a, b) for a, b in pairs]
    return all(torch.equal(a, b) if a is not None and b is not None else a is b for a, b in pairs)


def test_without_a_limit_everything_stays_and_with_one_the_oldest_groups_go_whole() -> None:
    group = torch.tensor([0, 0, 4, 4])
    unlimited, limited = ReplayBuffer(), ReplayBuffer(5)
    for tokens in ((1, 1, 2, 2), (3, 3, 4, 4)):
        given = experience_of(*((token, 1) for token in tokens))
        assert unlimited.append(given, group) == 0
        limited.append(given, group)
    assert first_tokens(unlimited) == [1, 1, 2, 2, 3, 3, 4, 4]
    assert first_tokens(limited) == [3, 3, 4, 4], (
        "3 rows of the older ones would fit, but no whole group and a half"
    )
    assert limited.append(experience_of((5, 1)), torch.tensor([0])) == 0
    assert limited.append(experience_of((6, 1)), torch.tensor([0])) == 1
    assert first_tokens(limited) == [4, 4, 5, 6]
    with pytest.raises(ValueError, match="A group of 6 rows does not fit the buffer's limit of 5"):
        limited.append(experience_of(*[(7, 1)] * 6), torch.zeros(6, dtype=torch.int64))


def test_rows_come_back_as_they_were_without_the_padding_of_others() -> None:
    given = experience_of((1, 4), (2, 2), (3, 1))
    buffer = ReplayBuffer(cpu_offload=False)
    buffer.append(given, torch.tensor([0, 1, 1]))
    kept = buffer.groups[1].tokens.values
    assert kept.untyped_storage().nbytes() == (4 + 3) * kept.itemsize, "what is left out goes"
    assert same(buffer[2], given.select(torch.tensor([2])))
    assert same(Experience.join(buffer[row] for row in range(3)), given)
    with pytest.raises(IndexError):
        buffer[3]


def test_a_group_is_as_old_as_its_oldest_token() -> None:
    buffer = ReplayBuffer()
    given = experience_of((1, 3), (2, 3), version=5)
    assert given.versions is not None
    given.versions[1][2] = 3  # its second token; the group's others are of version 5
    buffer.append(given, torch.tensor([0, 0]))
    buffer.append(experience_of((3, 2), version=4), torch.tensor([0]))
    assert buffer.drop_older(3) == 0
    assert buffer.drop_older(4) == 1
    assert first_tokens(buffer) == [3]
    buffer.append(replace(given, versions=None), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="does not say which policy chose"):
        buffer.drop_older(4)


def test_a_state_is_json_and_brings_every_bit_back() -> None:
    buffer, again = ReplayBuffer(), ReplayBuffer()
    given = experience_of((1, 4), (2, 2), version=7)
    prompts = Ragged.of([torch.tensor([5, 6, 7, 8, 9, 10, 11]), torch.tensor([4])])
    assert given.old_logp is not None
    given = replace(
        given, teacher_logp={"expert": given.old_logp}, teacher_prompts={"expert": prompts}
    )
    buffer.append(given, torch.tensor([3, 9]))
    said, tensors = taken_apart(buffer.state())
    again.load_state(put_together(json.loads(json.dumps(said)), joined(tensors).__getitem__))
    assert len(again.groups) == 2
    assert all(same(one, other) for one, other in zip(buffer.groups, again.groups, strict=True))


def test_a_state_of_format_2_is_read() -> None:
    buffer, again = ReplayBuffer(), ReplayBuffer()
    buffer.append(experience_of((1, 4), (2, 2), version=7), torch.tensor([3, 9]))
    file = io.BytesIO()
    torch.save([asdict(group.padded()) for group in buffer.groups], file)
    again.load_state({"groups": base64.b64encode(file.getvalue()).decode()})
    assert len(again.groups) == 2
    assert all(same(one, other) for one, other in zip(buffer.groups, again.groups, strict=True))


def test_lightrfts_dataloader_takes_the_buffer() -> None:
    buffer = ReplayBuffer()
    buffer.append(
        experience_of(*((token, 1 + token % 3) for token in range(1, 8))), torch.arange(7) // 2
    )
    strategy = SimpleNamespace(seed=0)
    batches = list(
        StrategyBase.setup_dataloader(
            strategy, buffer, 3, shuffle=False, drop_last=False, collate_fn=Experience.join
        )
    )
    firsts = [batch.padded().tokens[:, 0].tolist() for batch in batches]
    assert firsts == [[1, 2, 3], [4, 5, 6], [7]]
    shuffled = list(StrategyBase.setup_dataloader(strategy, buffer, 3, collate_fn=Experience.join))
    assert [len(batch) for batch in shuffled] == [3, 3]


def test_each_token_knows_its_policy_also_where_an_answer_went_on_after_a_push() -> None:
    prompts = [Prompt((5, 6)), Prompt((7,))]
    completions = [
        Completion((1, 2, 3), (-0.1, -0.2, -0.3), "stop", 4, versions=(3, 4, 4)),
        Completion((8,), (-0.5,), "length", 4),
    ]
    rollouts = [rollout_of(asked, said) for asked, said in zip(prompts, completions, strict=True)]
    samples = collect(
        prompts, rollouts, lambda asked, given: [{"reward": 0.0}] * len(given), samples_per_prompt=1
    )
    assert samples.versions is not None
    assert samples.padded().versions.tolist() == [[-1, 3, 4, 4], [4, -1, -1, -1]]
    short = samples.select(torch.tensor([1]))
    joined = Samples.join([short, samples])
    assert joined.versions is not None
    assert joined.padded().versions.tolist() == [[4, -1, -1, -1], [-1, 3, 4, 4], [4, -1, -1, -1]]
    assert Samples.join([replace(short, versions=None), samples]).versions is None


def test_a_buffer_with_images_under_their_former_name_is_read() -> None:
    images = RowImages(((PlacedImage("x.png", "digest", (1, 4, 6), 2, 6),),))
    given = replace(experience_of((7, 3)), images=images)
    buffer = ReplayBuffer()
    buffer.append(given, torch.tensor([0]))
    (group,) = buffer.state()["groups"]
    group["pictures"] = {"pictures": group.pop("images")["images"]}  # as before 2026-11-27
    again = ReplayBuffer()
    again.load_state({"groups": [group]})
    assert again[0].images == images
