import json
import math
from pathlib import Path

import pytest

from rftmega.config import DataConfig, RunConfig, load
from rftmega.config.schema import RewardConfig
from rftmega.config.tree import choices_of, options, unions, value_of, walk
from rftmega.config.validation import violations
from rftmega.config.validation.data import files
from rftmega.config.validation.paths import PATHS
from rftmega.core.errors import ConfigError
from tests.unit.config.overridden import leads, overridden, with_value

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What conftest.py's config_file holds, for all tests."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "config.json").write_text("{}")
    for name in ("model.safetensors", "train.jsonl"):
        (folder / name).write_text("")
    return {"model": {"path": str(folder)}, "data": {"train": str(folder / "train.jsonl")}}


@pytest.fixture(scope="module")
def sound(given: dict[str, dict[str, str]]) -> RunConfig:
    return load(given)


def test_a_sound_config_has_no_violations(config_file: Path) -> None:
    assert violations(load(config_file), world_size=1) == []


@pytest.mark.parametrize(
    ("override", "world", "complaint"),
    [
        (
            "parallel.tensor=3",
            4,
            "parallel.tensor = 3 does not divide the 4 launched processes. Launch 3 (--processes",
        ),
        ("parallel.sequence=true", 4, "parallel.sequence needs parallel.tensor > 1"),
        ("rollout.tensor=3", 4, "rollout.tensor=3 does not divide"),
        (
            "rollout.engine=vlm",
            1,
            "rollout.engine=vlm is unknown. Choose one of: vllm, sglang, transformers, scripted",
        ),
        ("rollout.temperature=0", 1, "rollout.temperature=0.0 must be positive"),
        ("trainer.push_to_hub=mine", 1, "trainer.push_to_hub=mine is no repository of the hub"),
        ("rollout.stop=['']", 1, "rollout.stop has an empty string"),
        ("rollout.servers=2", 1, "rollout.servers=2 needs strategy=separate"),
        ("rollout.deadline_seconds=60", 1, "rollout.deadline_seconds=60 needs strategy=separate"),
        ("faults.engine_restarts=-1", 1, "faults.engine_restarts=-1 must be at least 0"),
        ("algorithm.policy_loss.dual=0.5", 1, "algorithm.policy_loss.dual=0.5 must be above 1"),
        (
            "algorithm.kl.placement=reward",
            1,
            "algorithm.kl.placement=reward needs algorithm.advantage.type=leave_one_out or reinforce or gae",
        ),
        (
            "algorithm.kl.estimator=k1",
            1,
            "algorithm.kl.estimator=k1 needs algorithm.kl.coef above 0",
        ),
        ("reward.reasoning_markers=[a]", 1, "reward.reasoning_markers=['a'] must be two"),
        ("reward.reasoning_markers=[a, a]", 1, "must be two different texts"),
        ("reward.reasoning_markers=['', b]", 1, "must be two different texts"),
        ("reward.model=1", 1, "reward.model=1.0 and reward.model_path='' need each other"),
        ("reward.cost=1", 1, "reward.cost=1.0 and reward.cost_path='' need each other"),
        (
            "algorithm.reward_model_loss=cost",
            1,
            "algorithm.reward_model_loss=cost: with algorithm.task=rl nothing reads it",
        ),
        ("algorithm.ptx_coef=0.1", 1, "algorithm.ptx_coef=0.1 and data.ptx='' need each other"),
        ("data.ptx=/tmp", 1, "algorithm.ptx_coef=0.0 and data.ptx='/tmp' need each other"),
        (
            "rollout.train_samples_per_prompt=9",
            1,
            "is more than the completions a prompt gets (rollout.samples_per_prompt=8)",
        ),
        ("algorithm.kl.target=0.1", 1, "algorithm.kl.target=0.1 needs algorithm.kl.coef above 0"),
        ("algorithm.kl.horizon=5", 1, "algorithm.kl.horizon=5 needs algorithm.kl.target above 0"),
        (
            "reward.shaping.overlong_penalty_factor=2",
            1,
            "reward.shaping.overlong_penalty_factor=2.0 needs reward.shaping.overlong_buffer_share above 0",
        ),
        ("reward.shaping.overlong_buffer_share=1.5", 1, "must be at most 1"),
        (
            "algorithm.dynamic_sampling.metric=exact_match",
            1,
            "algorithm.dynamic_sampling.metric=exact_match needs algorithm.dynamic_sampling.max_rounds above 0",
        ),
        (
            "algorithm.dynamic_sampling.oversample=1.5",
            1,
            "algorithm.dynamic_sampling.oversample=1.5 needs algorithm.dynamic_sampling.max_rounds above 0",
        ),
        (
            "algorithm.replay.max_age=2",
            1,
            "algorithm.replay.max_age=2 needs algorithm.importance_sampling.type=token, sequence, mask or icepop",
        ),
        (
            "algorithm.replay.max_rows=64",
            1,
            "algorithm.replay.max_rows=64 needs algorithm.replay.max_age above 0",
        ),
        (
            "algorithm.dynamic_sampling.oversample=0.5",
            1,
            "algorithm.dynamic_sampling.oversample=0.5 must be at least 1",
        ),
        ("critic.warmup_steps=5", 1, "needs algorithm.advantage.type=gae, not group_norm"),
        ("algorithm.ema_beta=1", 1, "algorithm.ema_beta=1.0 must be below 1"),
        (
            "critic.parallel.tensor=2",
            1,
            "critic.parallel.tensor=2 needs algorithm.advantage.type=gae, not group_norm",
        ),
        ("critic.path=x", 1, "critic.path=x needs algorithm.advantage.type=gae, not group_norm"),
        (
            "data.label_key=",
            1,
            "data.label_key is empty, but reward.exact_match compares answers with labels",
        ),
        ("algorithm.high_entropy_share=1.5", 1, "must be at most 1"),
        ("algorithm.high_entropy_share=0", 1, "algorithm.high_entropy_share=0.0 must be positive"),
        ("algorithm.policy_loss.low=1", 1, "algorithm.policy_loss.low=1.0 must be below 1"),
        ("strategy=apart", 1, "strategy=apart is unknown. Choose one of: colocated, separate."),
        ("algorithm.updates_per_epoch=129", 1, "is more than the rows of a step"),
        ("trainer.max_tokens_per_micro_batch=100", 1, "can't hold one row"),
        ("reward.format=1", 1, "reward.format_pattern is empty"),
        (
            "reward.format_pattern=x",
            1,
            "reward.format_pattern=x needs a weight of reward.format: nothing else reads it",
        ),
        ("reward.remote=1", 1, "reward.remote_url is empty"),
        ("reward.remote_url=http://x", 1, "reward.remote_url needs a weight of reward.remote"),
        ("reward.judge_cache=x", 1, "reward.judge_cache=x needs a weight of reward.judge"),
        ("reward.workers=3", 1, "reward.workers=3 needs a weight of reward.math or reward.code"),
        ("reward.math=.nan", 1, "reward.math=nan must be a finite number"),
        ("reward.exact_match=0", 1, "No reward has a weight"),
        ("reward.remote_retries=-1", 1, "reward.remote_retries=-1 must be at least 0"),
        (
            "reward.recipe={sum: {maths: 1}}",
            1,
            "reward.recipe.sum: maths is unknown. Choose among: exact_match, format, math,",
        ),
        ("reward.recipe={sum: {math: 0}}", 1, "reward.recipe.sum gives no part a weight"),
        ("reward.recipe={sum: {format: 1}}", 1, "reward.format_pattern is empty"),
        ("data.kind_key=task", 1, "data.kind_key=task needs reward.recipe or reward.remote"),
        ("optimizer.warmup_steps=100", 1, "leaves nothing of the 100 optimizer steps"),
        (
            "optimizer.min_learning_rate=1",
            1,
            "optimizer.min_learning_rate=1.0 needs optimizer.schedule=linear or cosine",
        ),
        ("trainer.steps=0", 1, "trainer.steps=0 must be at least 1"),
        ("optimizer.clip_grad=-1", 1, "optimizer.clip_grad=-1.0 must be at least 0"),
        ("optimizer.beta1=1.5", 1, "optimizer.beta1=1.5 must be below 1"),
        ("optimizer.epsilon=-1", 1, "optimizer.epsilon=-1.0 must be positive"),
        ("rollout.memory_fraction=7", 1, "rollout.memory_fraction=7.0 must be below 1"),
        ("trainer.seed=1", 0, "--processes 0 must be at least 1"),
        ("model.path=/nowhere", 1, "model.path=/nowhere is not a folder"),
        ("data.eval=/nowhere", 1, "data.eval=/nowhere is not a file or folder"),
        ("data.evals.hard=/nowhere", 1, "data.evals.hard=/nowhere is not a file or folder"),
        (
            "trainer.eval_every=5",
            1,
            "trainer.eval_every=5 needs data.eval or data.evals: nothing else reads it",
        ),
        ("trainer.eval_pass_at=[1]", 1, "trainer.eval_pass_at=[1] needs data.eval or data.evals"),
        ("trainer.trajectories=-1", 1, "trainer.trajectories=-1 must be at least 0"),
        ("trainer.trajectories_mib=0", 1, "trainer.trajectories_mib=0 must be at least 1"),
        ("trainer.eval_samples=0", 1, "trainer.eval_samples=0 must be at least 1"),
        ("trainer.eval_temperature=-1", 1, "trainer.eval_temperature=-1.0 must be at least 0"),
        ("data.eval=/nowhere#test", 1, "data.eval=/nowhere#test is not a file or folder"),
        ("data.train=", 1, "data.train must be given, or data.sources"),
        ("data.sources={/: 1}", 1, "are both given. Leave one out"),
        (
            "data.response_key=answer",
            1,
            "data.response_key=answer: with algorithm.task=rl nothing reads it",
        ),
        (
            "data.chosen_key=good",
            1,
            "data.chosen_key=good: with algorithm.task=rl nothing reads it",
        ),
        (
            "checkpoint.keep=2",
            1,
            "checkpoint.keep=2 needs checkpoint.every above 0: nothing is saved",
        ),
        ("checkpoint.every=-1", 1, "checkpoint.every=-1 must be at least 0"),
        (
            "checkpoint.resume=/nowhere",
            1,
            "checkpoint.resume=/nowhere is not a folder. Give a checkpoint, or auto, or none",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_a_reason(
    override: str, world: int, complaint: str, sound: RunConfig, config_file: Path
) -> None:
    config = load(config_file, [override]) if leads(override) else overridden(sound, override)
    found = violations(config, world)
    assert len(found) == 1, found
    assert complaint in found[0]


def test_what_lies_outside_the_schedules_of_policy_and_critic_is_refused(config_file: Path) -> None:
    gae = ["algorithm.advantage=gae", "trainer.steps=100", "critic.warmup_steps=60"]
    for override, complaint in (
        (
            "optimizer.warmup_steps=50",
            "optimizer.warmup_steps=50 leaves nothing of the 40 optimizer steps",
        ),
        (
            "critic.optimizer.warmup_steps=500",
            "critic.optimizer.warmup_steps=500 leaves nothing of the 100",
        ),
        (
            "critic.optimizer.min_learning_rate=1",
            "critic.optimizer.min_learning_rate=1.0 needs critic.optimizer.schedule=linear or",
        ),
    ):
        assert complaint in violations(load(config_file, [*gae, override]), 1)[0]
    assert violations(load(config_file, [*gae, "critic.optimizer.warmup_steps=99"]), 1) == []


def test_a_hung_server_is_found_before_the_watchdog_ends_the_run_for_it(config_file: Path) -> None:
    watched = ["strategy=separate", "faults.watchdog_seconds=600"]
    assert (
        violations(load(config_file, watched), 1)
        == violations(load(config_file, [*watched, "rollout.deadline_seconds=599"]), 1)
        == []
    )
    (late,) = violations(load(config_file, [*watched, "rollout.deadline_seconds=600"]), 1)
    assert "rollout.deadline_seconds=600 must be below faults.watchdog_seconds=600" in late


def test_a_replay_buffer_holds_a_group_and_none_of_a_critics_making(config_file: Path) -> None:
    on = ["algorithm.replay.max_age=2", "algorithm.importance_sampling=token"]
    assert violations(load(config_file, [*on, "algorithm.replay.max_rows=8"]), 1) == []
    (small,) = violations(load(config_file, [*on, "algorithm.replay.max_rows=7"]), 1)
    assert "algorithm.replay.max_rows=7 can't hold the 8 completions" in small
    (critic,) = violations(load(config_file, [*on, "algorithm.advantage=gae"]), 1)
    assert "an earlier critic" in critic


def test_rewards_without_labels_need_none_and_groups_of_one_are_not_compared(
    config_file: Path,
) -> None:
    unlabelled = [
        "data.label_key=",
        "reward.exact_match=0",
        "reward.format=1",
        "reward.format_pattern=x",
    ]
    assert violations(load(config_file, unlabelled), 1) == []
    held_out = f"data.eval={config_file.with_name('train.jsonl')}"
    assert (
        "evaluation compares answers with labels"
        in violations(load(config_file, [*unlabelled, held_out]), 1)[0]
    )
    alone = ["algorithm.dynamic_sampling.max_rounds=1", "rollout.samples_per_prompt=1"]
    assert "there is one of each" in violations(load(config_file, alone), 1)[1]


@pytest.mark.parametrize("advantage", ["group_norm", "leave_one_out"])
@pytest.mark.parametrize(
    "one", ["rollout.samples_per_prompt=1", "rollout.train_samples_per_prompt=1"]
)
def test_an_answer_without_siblings_is_not_compared_with_them(
    one: str, advantage: str, config_file: Path
) -> None:
    found = violations(load(config_file, [one, f"algorithm.advantage={advantage}"]), 1)
    assert len(found) == 1
    assert found[0].startswith(
        f"{one} with algorithm.advantage.type={advantage}: a completion is compared with the others"
    )
    for other in ("reinforce", "gae"):
        assert violations(load(config_file, [one, f"algorithm.advantage={other}"]), 1) == []


NUMBERS = {
    (option.name, option.part): option.kind for option in walk() if option.kind in (int, float)
}


@pytest.fixture(scope="module")
def of_parts(given: dict[str, dict[str, str]]) -> list[tuple[RunConfig, dict[str, type]]]:
    """A config without parts and one of each part, with the numbers that only it has."""
    found: dict[tuple[str, ...], dict[str, type]] = {}
    for (name, part), kind in NUMBERS.items():
        parents = [name[:end] for end, letter in enumerate(name) if letter == "."]
        chosen = [f"{section}={part}" for section in parents if part and section in unions()]
        found.setdefault(tuple(chosen), {})[name] = kind
    return [(load(given, chosen), numbers) for chosen, numbers in found.items()]


def test_no_number_may_be_infinite_or_none(
    of_parts: list[tuple[RunConfig, dict[str, type]]],
) -> None:
    looked_at = 0
    for sound, numbers in of_parts:
        names = [name for name, kind in numbers.items() if kind is float]
        for value in ("nan", "inf", "-inf"):
            config = sound
            for name in names:
                config = with_value(config, name, float(value))
            wanted = {f"{name}={value} must be a finite number." for name in names}
            missing = wanted - {*violations(config, 1)}
            assert not missing
            looked_at += len(wanted)
    assert looked_at > 200


def test_numbers_in_lists_and_by_kind_are_finite_as_well(config_file: Path) -> None:
    found = violations(load(config_file, ["reward.recipe={a: {exact_match: .inf}}"]), 1)
    assert "reward.recipe.a.exact_match=inf must be a finite number." in found


def test_every_number_has_a_bound_or_is_known_to_need_none(
    of_parts: list[tuple[RunConfig, dict[str, type]]],
) -> None:
    """-3 where nothing below 0 is meant: refused by some rule, or listed here with the reason."""
    any_number = {
        *(f"reward.{part}" for part in RewardConfig().parts()),  # weights: a penalty is negative
        "reward.model",
        "algorithm.entropy_coef",  # negative: less entropy
    }
    assert len(NUMBERS) > 100
    for sound, numbers in of_parts:
        for name, kind in numbers.items():
            if name not in any_number:
                found = violations(with_value(sound, name, kind(-3)), 1)
                assert any(name.removeprefix("critic.") in reason for reason in found), name


def test_groups_are_replaced_by_a_part_that_every_answer_has(config_file: Path) -> None:
    refill = [
        "algorithm.dynamic_sampling.max_rounds=2",
        "reward.recipe={a: {math: 1, exact_match: 1}, b: {math: 1, code: 1}}",
    ]
    for part, known in (
        ("math", True),
        ("exact_match", True),
        ("code", False),
        ("majority", False),
    ):
        found = violations(
            load(config_file, [*refill, f"algorithm.dynamic_sampling.metric={part}"]), 1
        )
        assert (
            found == []
            if known
            else "is not in every completion's reward. Choose one of: exact_match, math."
            in found[0]
        )


def test_a_critic_takes_layout_and_optimizer_from_the_policy_where_it_is_given_none(
    config_file: Path,
) -> None:
    config = load(
        config_file,
        ["algorithm.advantage=gae", "parallel.tensor=2", "optimizer.learning_rate=1e-5", "critic.optimizer.learning_rate=1e-4",
         "parallel.pipeline=2", "critic.parallel.pipeline=1"],
    )  # fmt: skip
    assert (config.critic.parallel.tensor, config.critic.parallel.pipeline) == (2, 1)
    assert (config.critic.optimizer.learning_rate, config.critic.optimizer.beta2) == (
        1e-4,
        config.optimizer.beta2,
    )
    assert violations(config, 4) == []
    config.critic.parallel.tensor = 3
    (found,) = violations(config, 4)
    assert found.startswith(
        "For the critic: parallel.tensor = 3 does not divide the 4 launched processes"
    )


def test_learning_from_given_rows_reads_lengths_and_little_else(config_file: Path) -> None:
    sft = [
        "algorithm.task=sft",
        "data.response_key=answer",
        "rollout.max_response_tokens=8",
        "algorithm.loss_aggregation=sequence_mean",
    ]
    assert violations(load(config_file, sft), 1) == []
    held_out = f"data.eval={config_file.with_name('train.jsonl')}"
    assert (
        "trainer.eval_samples=2: with"
        in violations(load(config_file, [*sft, held_out, "trainer.eval_samples=2"]), 1)[0]
    )
    unread = [
        "rollout.temperature=0.5",
        "reward.math=1",
        "algorithm.kl.coef=1",
        "trainer.trajectories=1",
        "strategy=separate",
        "faults.engine_restarts=1",
    ]
    learning = load(config_file, sft)
    for override in unread:
        if leads(override):
            found = violations(load(config_file, [*sft, override]), 1)
        else:
            found = violations(overridden(learning, override), 1)
        assert [
            f"{override.partition('=')[0]}=" in reason and "nothing reads it" in reason
            for reason in found
        ] == [True]
    preference = ["algorithm.task=preference", "algorithm.preference=kto"]
    single = ["data.desirable_key=good", "data.response_key=answer"]
    assert violations(load(config_file, [*preference, *single]), 1) == []
    for overrides, complaint in (
        (["algorithm.preference.type=dpo", *single], "data.desirable_key=good needs algorithm.pre"),
        (
            [*single, "data.chosen_key=x"],
            "data.chosen_key=x: with algorithm.task=preference and da",
        ),
        (single[1:], "data.response_key=answer: with algorithm.task=preference nothing reads it"),
        (["trainer.max_tokens_per_micro_batch=4095"], "can't hold a pair of rows of"),
        ([*single, "trainer.max_tokens_per_micro_batch=2047"], "can't hold one row of"),
        (["algorithm.loss_aggregation=sequence_sum"], "algorithm.loss_aggregation=sequence_sum: w"),
    ):
        (found,) = violations(load(config_file, [*preference, *overrides]), 1)
        assert complaint in found
    reward_model = [
        "algorithm.task=reward_model",
        "data.chosen_key=good",
        "trainer.max_tokens_per_micro_batch=4097",
    ]
    assert "can't hold a pair of rows of" in violations(load(config_file, reward_model), 1)[0]
    assert (
        violations(
            load(config_file, [*reward_model[:2], "trainer.max_tokens_per_micro_batch=4098"]), 1
        )
        == []
    )


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["data.evals.a={}"], "data.eval and data.evals are both given"),
        (["data.eval=", "data.evals.a/b={}"], "data.evals: 'a/b' becomes a part of metrics' names"),
        (
            ["trainer.eval_samples=4"],
            "trainer.eval_samples=4 at trainer.eval_temperature=0 is the same completion each time",
        ),
        (
            ["trainer.eval_top_p=0.9"],
            "trainer.eval_top_p=0.9 at trainer.eval_temperature=0 changes nothing",
        ),
        (
            ["trainer.eval_pass_at=[2]"],
            "trainer.eval_pass_at=2 must be from 1 to trainer.eval_samples=1",
        ),
        (
            ["trainer.eval_pass_at=[0]"],
            "trainer.eval_pass_at=0 must be from 1 to trainer.eval_samples=1",
        ),
        (
            ["trainer.eval_accuracy=format"],
            "trainer.eval_accuracy=format needs a weight of that part",
        ),
        (
            ["trainer.eval_accuracy=speed"],
            "is no part of the reward. Choose one of: exact_match, format, math,",
        ),
    ],
)
def test_an_evaluation_that_makes_no_sense_is_refused(
    overrides: list[str], complaint: str, config_file: Path
) -> None:
    held_out = config_file.with_name("train.jsonl")
    given = [
        f"data.eval={held_out}",
        *(override.replace("{}", str(held_out)) for override in overrides),
    ]
    found = violations(load(config_file, given), 1)
    assert len(found) == 1, found
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("weights", "complaint"),
    [
        ({"/": 0.0}, "data.sources: the weight 0.0 of / must be positive and finite"),
        ({"/": math.inf, "/tmp": 1.0}, "the weight inf of /"),
        ({"/": math.nan}, "the weight nan of /"),
        ({"/": 1.0, "/nowhere": 1.0}, "data.sources: /nowhere is not a file or folder"),
        (
            {"/": 1234567.0, "/tmp": 1.0},
            "exact only after 1234568 examples, more than 100000. Round them",
        ),
    ],
)
def test_sources_that_cannot_be_mixed_are_refused(
    weights: dict[str, float], complaint: str, config_file: Path
) -> None:
    config = load(config_file, ["data.train=", f"data.sources={json.dumps(weights)}"])
    found = violations(config, 1)
    assert len(found) == 1, found
    assert complaint in found[0]


def test_a_bound_on_trajectories_that_are_not_written_is_refused(config_file: Path) -> None:
    found = violations(
        load(config_file, ["trainer.trajectories=0", "trainer.trajectories_mib=5"]), 1
    )
    assert found == [
        "trainer.trajectories_mib=5 needs trainer.trajectories above 0: none are written."
    ]


def test_given_answers_are_enough_for_every_optimizer_step(config_file: Path) -> None:
    """16 prompts a step, 8 answers to each."""
    given = [
        f"data.ptx={config_file.with_name('train.jsonl')}",
        "algorithm.ptx_coef=0.1",
        "data.response_key=label",
    ]
    assert violations(load(config_file, [*given, "algorithm.updates_per_epoch=16"]), 1) == []
    found = violations(load(config_file, [*given, "algorithm.updates_per_epoch=17"]), 1)
    assert [reason.partition(" (")[0] for reason in found] == ["17 optimizer steps a rollout"]
    assert (
        "algorithm.updates_per_epoch=17 x algorithm.epochs_per_rollout=1) are more than the examples of data.ptx"
        in found[0]
    )
    (reason,) = violations(
        load(
            config_file, [*given, "algorithm.updates_per_epoch=8", "algorithm.epochs_per_rollout=3"]
        ),
        1,
    )
    assert reason.startswith("24 optimizer steps a rollout")
    assert (
        "data.ptx=/nowhere is not a file"
        in violations(load(config_file, [*given, "data.ptx=/nowhere"]), 1)[0]
    )


def test_held_out_files_have_names_of_their_own(config_file: Path) -> None:
    held_out = config_file.with_name("train.jsonl")
    config_file.write_text(
        config_file.read_text().replace("data: {", f"data: {{evals: {{easy: {held_out}}}, ")
    )
    config = load(config_file, [f"data.evals.hard={held_out}"])
    assert config.data.held_out == {"easy": str(held_out), "hard": str(held_out)}
    assert violations(config, 1) == []
    assert load(config_file).data.held_out == {"easy": str(held_out)}
    with pytest.raises(ConfigError, match=r"data\.evals='x'"):
        load(config_file, ["data.evals=x"])


def test_a_reward_recipe_is_read_whole_from_file_or_override_and_replaces_the_weights_beside_it(
    config_file: Path,
) -> None:
    config_file.write_text(
        config_file.read_text()
        + "reward: {math_seconds: 2, recipe: {sum: {math: 1, exact_match: 0.5}}}\n"
    )
    config = load(config_file, ["data.kind_key=task"])
    assert config.reward.recipe == {"sum": {"math": 1.0, "exact_match": 0.5}}
    assert violations(config, 1) == []
    assert load(config_file, ["reward.recipe={a.b: {code: 2}}"]).reward.recipe == {
        "a.b": {"code": 2.0}
    }
    assert (
        "reward.math=1.0 beside reward.recipe"
        in violations(load(config_file, ["reward.math=1"]), 1)[0]
    )
    with pytest.raises(ConfigError, match=r"reward\.recipe="):
        load(config_file, ["reward.recipe={sum: {math: much}}"])


def test_all_violations_come_at_once(config_file: Path) -> None:
    bad = [
        "parallel.tensor=3",
        "rollout.tensor=3",
        "rollout.engine=vlm",
        "model.path=/nowhere",
        "algorithm.updates_per_epoch=1000",
    ]
    # 3 of the engine: name, size, and size for this engine
    assert len(violations(load(config_file, bad), world_size=4)) == 6


def test_a_model_folder_without_weights_or_with_a_missing_shard_is_refused(
    config_file: Path,
) -> None:
    config = load(config_file)
    folder = Path(config.model.path)
    (folder / "model.safetensors").unlink()
    assert "holds no *.safetensors weights" in violations(config, 1)[0]
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors"}})
    )
    assert "names model-1.safetensors, which is missing" in violations(config, 1)[0]


def test_servers_have_a_model(tmp_path: Path) -> None:
    config = load(
        ROOT / "examples/arithmetic/grpo.yaml",
        ["strategy=separate", "rollout.tensor=3", "rollout.engine=scripted"],
    )
    found = [reason for reason in violations(config, 4) if "rollout" in reason]
    assert found == [
        "rollout.cpu_cache_gib=0.05 needs rollout.engine=vllm: nothing else reads it.",
        "strategy=separate takes servers of vLLM and SGLang, not rollout.engine=scripted. Set it to vllm.",
    ]


SECRET_URLS = {
    "that nothing reads": ["reward.remote_url=http://me:s3cr3t@host"],
    "without http": ["reward.remote=1", "reward.remote_url=me:s3cr3t@host"],
    "with a port that is none": [
        "reward.remote=1",
        "reward.remote_url=http://me:s3cr3t/s3cr3t@host",
    ],
    "without a host": ["reward.remote=1", "reward.remote_url=http://?key=s3cr3t"],
    "of a task without rewards": ["algorithm.task=sft", "reward.remote_url=http://me:s3cr3t@host"],
}


@pytest.mark.parametrize("kind", SECRET_URLS)
def test_an_address_that_is_complained_about_is_not_shown(kind: str, config_file: Path) -> None:
    found = "\n".join(violations(load(config_file, SECRET_URLS[kind]), 1))
    assert "reward.remote_url" in found
    assert "s3cr3t" not in found


TEXTS = (  # options that are texts and neither paths nor choices
    "rollout.speculative.path",  # of one type alone
    *(
        f"environment.{name}"
        for name in ("name", "environment", "function", "python", "renderer", "tool_parser")
    ),
    "environment.action_key",
    "environment.observation_key",
    *(
        f"data.{name}_key"
        for name in (
            "prompt",
            "label",
            "kind",
            "response",
            "chosen",
            "rejected",
            "desirable",
            "images",
            "videos",
            "audio",
            "tools",
            "alpaca_input",
        )
    ),
    "data.system_prompt",
    "rollout.listen",
    *(
        "reward.answer_pattern",
        "reward.format_pattern",
        "reward.remote_url",
        *(f"reward.judge_{name}" for name in ("url", "model", "key_env", "template", "pattern")),
        "algorithm.recipe",
        "algorithm.dynamic_sampling.metric",
    ),
    *(
        "trainer.eval_accuracy",
        "logging.wandb",
        "logging.mlflow",
        "logging.trackio",
        "trainer.push_to_hub",
        "logging.prometheus_host",
    ),
)


def test_of_every_text_option_it_is_known_whether_it_is_a_path() -> None:
    texts = {
        name
        for name, kind in options().items()
        if kind is str and not name.startswith("critic.parallel")
    }
    texts -= {
        option.name for option in walk() if choices_of(option.hint) or option.name.endswith(".type")
    }
    assert texts == {*PATHS, *TEXTS}


@pytest.mark.parametrize("name", PATHS)
def test_an_empty_path_is_refused(name: str, sound: RunConfig) -> None:
    """Or stands for none, which its default says, too."""
    for empty in ("", " ", "\t"):
        config = with_value(sound, name, empty)
        refused = any(
            reason.startswith(f"{name}={empty} is empty. Give a path")
            for reason in violations(config, 1)
        )
        assert refused == (bool(empty) or value_of(RunConfig(), name) != ""), empty


def test_an_empty_name_of_a_source_or_a_held_out_file_is_refused(config_file: Path) -> None:
    config = load(config_file, ["data.train="])
    config.data.sources, config.data.evals = {"": 1.0}, {"hard": ""}
    found = violations(config, 1)
    assert "data.sources: a source= is empty. Give a path." in found
    assert "data.evals.hard= is empty. Give a path." in found


def test_a_path_with_a_nul_is_none(config_file: Path) -> None:
    config = load(config_file, [])
    config.trainer.output = "runs\0"
    assert any(
        reason.startswith("trainer.output='runs\\x00' is no path")
        for reason in violations(config, 1)
    )


def test_a_nul_in_a_path_of_a_list_is_refused_by_name(config_file: Path) -> None:
    config = load(config_file, [])
    config.data.sources, config.data.evals = {"a\0": 1.0}, {"hard": "b\0"}
    config.model.lora.evaluated = {"first": "c\0"}
    found = violations(config, 1)
    for name in ("data.sources: a source", "data.evals.hard", "model.lora.evaluated.first"):
        assert any(reason.startswith(f"{name}=") and "NUL" in reason for reason in found), name


def functions_in(config_file: Path) -> Path:
    file = config_file.with_name("mine.py")
    file.write_text("def f(completions):\n    return [0.0]\nmath = reward = f\n")
    return file


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["reward.functions=[{file}:math]"], "math is the name of another part"),
        (["reward.functions=[{file}:reward]"], "reward is the name of another part"),
        (["reward.functions=[{file}:f, {file}:f]"], "f is the name of another part"),
        (["reward.functions=[{file}:h]"], "h of {file} is not there"),
        (
            ["reward.functions=[{file}:f]", "reward.function_weights=[1,2]"],
            "must be one for each of reward.functions (1)",
        ),
        (
            [
                "reward.functions=[{file}:f]",
                "reward.function_weights=[1]",
                "reward.recipe={{a: {{f: 1}}}}",
            ],
            "reward.function_weights=[1.0] beside reward.recipe",
        ),
        (
            ["reward.functions=[{file}:f]", "reward.function_weights=[0]"],
            "No reward has a weight",
        ),
        (
            ["reward.functions=[{file}:f]", "data.eval={file}", "trainer.eval_accuracy=format"],
            "trainer.eval_accuracy=format needs a weight of that part",
        ),
    ],
)
def test_reward_functions_that_cannot_be_are_refused(
    overrides: list[str], complaint: str, config_file: Path
) -> None:
    file = functions_in(config_file)
    given = [override.format(file=file) for override in overrides]
    found = violations(load(config_file, given), 1)
    assert any(complaint.format(file=file) in reason for reason in found), found


def test_a_reward_function_alone_needs_no_labels(config_file: Path) -> None:
    file = functions_in(config_file)
    assert violations(load(config_file, [f"reward.functions=[{file}:f]"]), 1) == []
    held_out = [f"reward.functions=[{file}:f]", f"data.eval={config_file}"]
    assert violations(load(config_file, held_out), 1) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "reward.judge_url is empty"),
        (["reward.judge_model="], "reward.judge_model is empty"),
        (["reward.judge_url=ftp://x"], "reward.judge_url is no address"),
        (["reward.judge_url=http://me:s3cr3t@x"], "reward.judge_url holds a user or a password"),
        (
            ["reward.judge_url=http://x", "reward.judge_scale=[3]"],
            "reward.judge_scale=[3.0] must be",
        ),
        (
            ["reward.judge_url=http://x", "reward.judge_scale=[3, 3]"],
            "reward.judge_scale=[3.0, 3.0] must be",
        ),
    ],
)
def test_a_judge_that_can_not_work_is_refused(
    options: list[str], says: str, config_file: Path
) -> None:
    config = load(config_file, ["reward.judge=1", "reward.judge_model=wise", *options])
    found = "\n".join(violations(config, 1))
    assert says in found
    assert "s3cr3t" not in found


def test_a_missing_file_is_told_once_by_the_option_that_named_it() -> None:
    """An evaluation has its data as data.train as well, which nobody gave."""
    config = RunConfig(data=DataConfig(train="/nowhere", eval="/nowhere"))
    told = [problem for problem in files(config) if "/nowhere" in problem]
    assert told == ["data.eval=/nowhere is not a file or folder."]


def test_each_held_out_set_without_a_file_is_told() -> None:
    config = RunConfig(data=DataConfig(train="/nowhere", evals={"easy": "", "hard": ""}))
    told = [problem for problem in files(config) if problem.startswith("data.")]
    assert len(told) == 3, told
