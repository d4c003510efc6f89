import inspect
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rftmega.algorithms.gae import gae
from rftmega.config import RolloutConfig
from rftmega.core.types import Prompt, Rollout, Rows, TokenStats
from rftmega.lightrft.naive_experience_maker import NaiveExperienceMaker
from rftmega.lightrft.padded_experience import BEHAVIOUR, Samples
from tests.rollouts import Alone, completion_of

CONTROLLER = SimpleNamespace(value=0.1)


class Words:
    """A tokenizer: a word's id is its length."""

    pad_token_id = 1  # the engine's stop token, too

    def encode(self, text: str, *, chat_template: bool) -> tuple[int, ...]:
        return tuple(map(len, text.split()))


class Toy:
    """Policy and critic: what they say of a target depends on its token and its column alone."""

    def log_probs(self, rows: Rows) -> TokenStats:
        logp = -rows.tokens[:, 1:].float() / 10
        return TokenStats(logp, logp * 2)

    def reference_log_probs(self, rows: Rows) -> TokenStats:
        return TokenStats(self.log_probs(rows).logp - 0.5, None)

    def values(self, rows: Rows) -> Tensor:
        return torch.arange(1.0, rows.tokens.shape[1]).expand(len(rows), -1)


class Engines(Alone):
    """All engines of a run: where `judges`, answers come back with their scores."""

    judges = False

    def generate(
        self, prompts: Sequence[Prompt], *, reward: Any = None, **settings: Any
    ) -> list[Rollout]:
        completions = super().generate(prompts, **settings)
        if not self.judges or reward is None:
            return completions  # type: ignore[no-any-return]
        halves = [slice(0, 1), slice(1, None)]  # in parts, which may cut a group
        scores = [score for half in halves for score in reward(prompts[half], completions[half])]
        return [
            replace(completion, scores=score)
            for completion, score in zip(completions, scores, strict=True)
        ]


def engine(*, judges: bool = False) -> Engines:
    found = Engines(RolloutConfig(max_response_tokens=5), vocabulary=20, stop_ids=[1])
    found.load_weights([], version=0)
    found.judges = judges
    return found


def first_token(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
    pairs = zip(prompts, rollouts, strict=True)
    return [
        {"reward": c.response_ids[0] + (100.0 if prompt.label == "yes" else 0.0)}
        for prompt, c in pairs
    ]


def maker(
    critic: Any = None, reward: Any = first_token, controller: Any = CONTROLLER, **settings: Any
) -> NaiveExperienceMaker:
    toy = Toy()
    strategy = SimpleNamespace(engine=engine(), args=SimpleNamespace(**settings.pop("args", {})))
    return NaiveExperienceMaker(
        toy, critic, reward, toy, Words(), 3, controller, strategy, **settings
    )


PROMPTS = ["a bb ccc dddd", "dddd", Prompt((7, 7), label="yes")]


def test_the_constructor_takes_what_users_of_lightrft_give_in_their_order() -> None:
    assert " ".join(inspect.signature(NaiveExperienceMaker).parameters) == (
        "actor critic reward_model initial_model tokenizer prompt_max_len kl_controller strategy remote_rm_url reward_fn "
        "reward_fn_label_map reward_recipe processor"
    )


def test_answers_come_in_batches_siblings_side_by_side_whatever_the_size_of_a_batch() -> None:
    found = maker().generate_samples(
        PROMPTS, n_samples_per_prompt=3, micro_rollout_batch_size=4, labels=["no", "yes", ""]
    )
    assert [len(samples.response_length) for samples in found] == [4, 4, 1]
    assert [
        group for samples in found for group in (samples.group if samples.group is not None else [])
    ] == [0] * 3 + [1] * 3 + [2] * 3
    assert [label for samples in found for label in samples.labels] == ["no"] * 3 + ["yes"] * 6
    prompts = [prompt.token_ids for samples in found for prompt in samples.prompts]
    assert prompts == [(1, 2, 3)] * 3 + [(4,)] * 3 + [(7, 7)] * 3  # cut off at prompt_max_len
    (whole,) = maker().generate_samples(
        PROMPTS, n_samples_per_prompt=3, micro_rollout_batch_size=9, labels=["no", "yes", ""]
    )
    completions = [completion for samples in found for completion in samples.rollouts or []]
    assert completions == whole.rollouts
    rows = whole.rows()
    for ids, begin, end, completion in zip(
        rows.tokens.tolist(), rows.prompt_lengths, rows.lengths, completions, strict=True
    ):
        assert ids[begin:end] == completion.response_ids


def test_two_rollouts_draw_differently_and_a_seed_decides_them() -> None:
    one, other, again = maker(), maker(), maker()
    drawn = [each.generate_samples(["a"] * 6, seed=3)[0].rollouts for each in (one, one, other)]
    assert drawn[0] == drawn[2]
    assert drawn[0] != drawn[1]
    assert again.generate_samples(["a"] * 6, seed=4)[0].rollouts != drawn[0]


def test_options_come_from_the_strategys_args_and_keywords_come_first() -> None:
    made = maker(args={"n_samples_per_prompt": 2, "micro_rollout_batch_size": 3})
    assert [len(samples.prompts) for samples in made.generate_samples(["a", "b", "c"])] == [3, 3]
    assert [
        len(samples.prompts)
        for samples in made.generate_samples(["a", "b", "c"], n_samples_per_prompt=1)
    ] == [3]


@pytest.mark.parametrize(
    ("option", "why"),
    [("max_new_tokens", "rollout.max_response_tokens"), ("top_q", "options are .*labels")],
)
def test_an_option_that_nothing_reads_is_refused(option: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"{option}=5 is not read here: {why}"):
        maker().make_experience_list(["a"], **{option: 5})


def test_an_experience_holds_what_policy_critic_reward_and_engine_say_of_each_token() -> None:
    made = maker(critic=Toy())
    (samples,) = made.generate_samples(PROMPTS, n_samples_per_prompt=2)
    for laid_out in (samples, samples.packed()):
        found = made.make_experience(laid_out)
        assert (
            found.info is not None
            and found.values is not None
            and found.kl is not None
            and found.action_mask is not None
        )
        assert found.base_action_log_probs is not None and found.action_entropy is not None
        for row, completion in enumerate(samples.rollouts or []):
            ids, number = torch.tensor(completion.response_ids), len(completion.response_ids)
            logp = -ids / 10
            torch.testing.assert_close(found.action_log_probs[row, :number], logp)
            torch.testing.assert_close(found.base_action_log_probs[row, :number], logp - 0.5)
            torch.testing.assert_close(found.action_entropy[row, :number], 2 * logp)
            torch.testing.assert_close(found.kl[row, :number], torch.full((number,), 0.5))
            begin = len(samples.prompts[row].token_ids)
            assert found.values[row, :number].tolist() == list(range(begin, begin + number))
            assert found.info[BEHAVIOUR][row, :number].tolist() == pytest.approx(
                completion_of(completion).logprobs
            )
            assert (
                found.info["reward"][row]
                == first_token([samples.prompts[row]], [completion])[0]["reward"]
            )
            assert bool(found.info["truncated"][row]) is completion.truncated
            assert found.action_mask[row].tolist() == [True] * number + [False] * (
                found.action_mask.shape[1] - number
            )
            assert not found.kl[row, number:].any()
        assert found.sequences.tolist() == samples.sequences.tolist()


def by_hand(reward: float, number: int) -> Tensor:
    """A penalty of 0.1 x 0.5 a token, the reward at the last one."""
    return torch.tensor([-0.05] * (number - 1) + [reward - 0.05])


def test_with_a_critic_advantages_are_gae_of_the_rewards_minus_the_penalty() -> None:
    found = maker(critic=Toy()).make_experience_list(
        PROMPTS, gamma=0.9, lambd=0.8, micro_rollout_batch_size=2
    )
    for experience in found:
        assert (
            experience.advantages is not None
            and experience.returns is not None
            and experience.values is not None
        )
        assert experience.info is not None and experience.action_mask is not None
        for row, number in enumerate(experience.action_mask.sum(-1).tolist()):
            rewards = by_hand(float(experience.info["reward"][row]), number)
            expected = gae(
                experience.values[row : row + 1, :number],
                rewards[None],
                torch.ones(1, number),
                0.9,
                0.8,
            )
            torch.testing.assert_close(experience.advantages[row : row + 1, :number], expected[0])
            torch.testing.assert_close(experience.returns[row : row + 1, :number], expected[1])
            assert experience.info["return"][row] == pytest.approx(float(rewards.sum()), rel=1e-5)


def test_clipped_advantages_are_told_as_the_share_of_a_responses_tokens() -> None:
    (plain,) = maker(critic=Toy()).make_experience_list(PROMPTS)
    assert plain.advantages is not None
    assert plain.action_mask is not None
    assert plain.info is not None
    assert plain.info["clip_frac"].tolist() == [0.0] * len(plain.sequences)
    bound = float(plain.advantages[plain.action_mask].abs().median())
    (found,) = maker(critic=Toy()).make_experience_list(PROMPTS, advantage_clip=bound)
    assert found.info is not None
    assert found.advantages is not None
    for row, number in enumerate(plain.action_mask.sum(-1).tolist()):
        before = plain.advantages[row, :number].tolist()
        wanted = [max(-bound, min(bound, value)) for value in before]
        assert found.advantages[row, :number].tolist() == pytest.approx(wanted)
        share = sum(abs(value) > bound for value in before) / number
        assert float(found.info["clip_frac"][row]) == pytest.approx(share)
    assert 0 < float(found.info["clip_frac"].mean()) < 1


@pytest.mark.parametrize("controller", [CONTROLLER, None])
def test_groups_are_judged_as_a_whole_although_they_lie_in_two_batches(controller: Any) -> None:
    made = maker(controller=controller, args={"advantage_estimator": "rloo"})
    found = made.make_experience_list(
        ["a", "b"], n_samples_per_prompt=3, micro_rollout_batch_size=2, gamma=0.5
    )
    rewards = [
        float(reward) for experience in found for reward in (experience.info or {})["reward"]
    ]
    shaped = [r - (sum(rewards[i - i % 3 : i - i % 3 + 3]) - r) / 2 for i, r in enumerate(rewards)]
    row = 0
    for experience in found:
        assert (
            experience.returns is not None
            and experience.advantages is not None
            and experience.action_mask is not None
        )
        for returns, number in zip(
            experience.returns, experience.action_mask.sum(-1).tolist(), strict=True
        ):
            placed = by_hand(shaped[row], number) + (0.0 if controller else 0.05)
            expected = [
                sum(0.5**k * float(placed[t + k]) for k in range(number - t)) for t in range(number)
            ]
            assert returns[:number].tolist() == pytest.approx(expected, abs=1e-4)
            row += 1
        assert experience.advantages.tolist() == experience.returns.tolist()
    assert row == 6


def test_generation_scoring_shaping_and_advantages_follow_each_other() -> None:
    said: list[str] = []

    class Watched(NaiveExperienceMaker):
        def generate_samples(self, all_prompts: Any, **kw: Any) -> list[Samples]:
            said.append("generate")
            return super().generate_samples(all_prompts, **kw)

        def make_experience(self, samples: Samples) -> Any:
            said.append("score")
            return super().make_experience(samples)

        def process_experiences(self, experiences: Any) -> Any:
            said.append("shape")
            experiences, rewards = super().process_experiences(experiences)
            return experiences[:1], rewards[:1]  # a filter

        def get_cumulative_returns(self, *args: Any) -> Tensor:
            said.append("returns")
            return super().get_cumulative_returns(*args)

    strategy = SimpleNamespace(engine=engine(), args=None)
    made = Watched(Toy(), None, first_token, None, Words(), 3, None, strategy)
    assert len(made.make_experience_list(["a", "b", "c"], micro_rollout_batch_size=2)) == 1
    assert said == ["generate", "score", "score", "shape", "returns"]


def test_several_rewards_are_combined_by_the_function_given() -> None:
    seen: dict[str, Any] = {}

    def combine(parts: Sequence[Tensor], **options: Any) -> Tensor:
        seen.update(options)
        return parts[0] - 2 * parts[1]

    made = maker(
        reward=[first_token, lambda prompts, completions: [{"reward": 0.25}] * len(prompts)],
        reward_fn=combine, reward_fn_label_map={"math": 0}, reward_recipe={"math": []},
    )  # fmt: skip
    (samples,) = made.generate_samples(["a", "b"], labels=["x", "y"])
    info = made.make_experience(samples).info or {}
    assert info["reward"].tolist() == [
        completion.response_ids[0] - 0.5 for completion in samples.rollouts or []
    ]
    assert seen == {"labels": ["x", "y"], "label_map": {"math": 0}, "recipe": {"math": []}}


class Ranked:
    """How many of a prompt's other answers begin with a smaller token: of whole groups."""

    whole_groups = True

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]
    ) -> list[dict[str, float]]:
        self.calls += 1
        pairs = [(prompt, c.response_ids[0]) for prompt, c in zip(prompts, rollouts, strict=True)]
        return [
            {"reward": float(sum(p is prompt and x < first for p, x in pairs))}
            for prompt, first in pairs
        ]


@pytest.mark.parametrize("judges", [False, True])
def test_every_reward_is_asked_once_an_answer_by_the_engine_where_it_can_and_of_whole_groups_at_the_end(
    judges: bool,
) -> None:
    asked: list[Rollout] = []

    def counted(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
        asked.extend(rollouts)
        return first_token(prompts, rollouts)

    ranked = Ranked()
    made = maker(
        reward=[counted, ranked], reward_fn=lambda parts, **options: 10 * parts[0] + parts[1]
    )
    made.strategy.engine = engine(judges=judges)
    # cuts both groups
    batches = made.generate_samples(["a", "b"], n_samples_per_prompt=4, micro_rollout_batch_size=3)
    completions = [completion for samples in batches for completion in samples.rollouts or []]
    firsts = [completion.response_ids[0] for completion in completions]
    assert (len(asked), ranked.calls) == (8, 1)
    found = [
        float(reward)
        for samples in batches
        for reward in (made.make_experience(samples).info or {})["reward"]
    ]
    others = [
        [x for x in firsts[i - i % 4 : i - i % 4 + 4] if x < first]
        for i, first in enumerate(firsts)
    ]
    assert found == [
        10.0 * first + len(smaller) for first, smaller in zip(firsts, others, strict=True)
    ]
    assert any(others), "answers differ, so ranks were compared"
    assert (len(asked), ranked.calls) == (8, 1), "nobody is asked again for the experience"


def test_answers_from_elsewhere_are_judged_too() -> None:
    rows = Rows.of_completions(torch.tensor([[5, 6, 9, 1]]), torch.tensor([2]), torch.tensor([4]))
    found = maker().make_experience(Samples.of(rows, prompts=["text"], labels=["yes"]))
    assert found.info is not None
    assert found.info["reward"].tolist() == [109.0]
    assert BEHAVIOUR not in found.info


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"remote_rm_url": "http://x"}, "give reward_model a Reward that asks the server"),
        ({"reward": [first_token, first_token]}, "need a reward_fn"),
        ({"reward_recipe": {"a": 1}}, "need a reward_fn"),
        ({"args": {"advantage_estimator": "gae"}}, "needs values"),
        ({"args": {"advantage_estimator": "best"}}, "'best' is unknown"),
    ],
)
def test_what_can_not_work_is_refused_at_once(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        maker(**settings)


def test_texts_become_left_padded_tensors_or_lists() -> None:
    made = maker()
    found = made.tokenize_fn(["a bb ccc dddd", "dddd"], 3, device="cpu")
    assert {name: x.tolist() for name, x in found.items()} == {
        "input_ids": [[1, 2, 3], [1, 1, 4]],
        "attention_mask": [[1, 1, 1], [0, 0, 1]],
    }
    assert made.tokenize_fn(["a bb ccc dddd", "dddd"], 3, padding=False) == [[1, 2, 3], [4]]
    # as one of transformers is called
    made.tokenizer = lambda text, add_special_tokens: {"input_ids": [len(text)]}
    assert made.tokenize_fn("four", 3, padding=False) == [[4]]


def test_as_many_labels_as_prompts() -> None:
    with pytest.raises(ValueError, match="1 labels for 2 prompts"):
        maker().generate_samples(["a", "b"], labels=["x"])


def test_advantages_and_returns_are_the_documented_sums() -> None:
    """Adv1 = R1 + gl R2 + .. - V1 + g(1 - l) V2 + ggl(1 - l) V3; Ret1 is the same without - V1."""
    values, rewards = torch.tensor([[0.5, -1.0, 2.0]]), torch.tensor([[0.1, 0.7, -0.3]])
    gamma, lambd = 0.9, 0.8
    advantages, returns = maker(critic=Toy()).get_advantages_and_returns(
        values, rewards, torch.ones(1, 3), gamma, lambd
    )
    both = gamma * lambd
    first = 0.1 + both * 0.7 + both**2 * -0.3
    first += gamma * (1 - lambd) * -1.0 + gamma**2 * lambd * (1 - lambd) * 2.0
    assert returns[0, 0].item() == pytest.approx(first, abs=1e-6)
    assert advantages[0, 0].item() == pytest.approx(first - 0.5, abs=1e-6)
