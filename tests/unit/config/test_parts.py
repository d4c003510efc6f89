"""Parts of an algorithm: tagged unions, former names of options, layers, and recipes from outside
the package.
"""

from pathlib import Path

import pytest

from rftmega.algorithms import advantages, losses, preference
from rftmega.config import RunConfig, load
from rftmega.config.options.algorithms import CPGD, GAE, GSPO, Clip, GroupNorm, TokenImportance
from rftmega.config.options.parts import IMPLEMENTATIONS, Advantage, implements
from rftmega.config.options.preference import KTO
from rftmega.config.renamed import REMOVED, RENAMED, RENAMED_TYPES
from rftmega.config.tree import choices_of, options, unions, walk
from rftmega.config.validation import violations
from rftmega.core.errors import ConfigError
from rftmega.environments import create as environments
from rftmega.run.option_reference import option_reference


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text("model: {path: x}\n")
    return tmp_path / "run.yaml"


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load(path, list(overrides))
    return str(raised.value)


def test_an_empty_algorithm_is_grpo(path: Path) -> None:
    path.write_text("model: {path: x}\nalgorithm:\n")
    chosen = load(path).algorithm
    assert (chosen.advantage, chosen.policy_loss, chosen.importance_sampling.type) == (
        GroupNorm(),
        Clip(),
        "none",
    )
    assert (chosen.loss_aggregation, chosen.kl.coef, chosen.updates_per_epoch) == (
        "token_mean",
        0.0,
        1,
    )


def test_a_part_is_its_name_or_a_mapping_or_dotted_options(path: Path) -> None:
    ways = (
        ["algorithm.advantage=gae", "algorithm.advantage.lam=0.5"],
        ["algorithm.advantage={type: gae, lam: 0.5}"],
        ["algorithm.advantage.type=gae", "algorithm.advantage.lam=0.5"],
    )
    for way in ways:
        assert load(path, way).algorithm.advantage == GAE(lam=0.5)
    for written in ("gae", "{type: gae}", "\n    type: gae"):
        path.write_text(f"model: {{path: x}}\nalgorithm:\n  advantage: {written}\n")
        assert load(path).algorithm.advantage == GAE()


def test_numbers_of_a_part_may_be_those_of_another_option(path: Path) -> None:
    path.write_text(
        "model: {path: x}\noptimizer: {clip_grad: 0.5}\nalgorithm: {policy_loss: {high: '${optimizer.clip_grad}'}}\n"
    )
    assert load(path).algorithm.policy_loss == Clip(high=0.5)


def test_a_type_that_there_is_not_is_refused_with_the_nearest_and_all_that_there_are(
    path: Path,
) -> None:
    told = refusal(
        path, "algorithm.advantage.type=gea", "algorithm.policy_loss=clipp", "trainer.steps=x"
    )
    assert (
        "algorithm.advantage.type=gea is unknown. Did you mean gae? Choose one of: group_norm, leave_one_out, "
        in told
    )
    assert "algorithm.policy_loss.type=clipp is unknown. Did you mean clip?" in told
    assert "trainer.steps='x' must be a whole number." in told, "all problems are in one list"


def test_an_option_of_another_part_is_refused_with_the_type_that_has_it(path: Path) -> None:
    assert (
        "algorithm.advantage.lam=0.9 needs algorithm.advantage.type=gae, not group_norm"
        in refusal(path, "algorithm.advantage.lam=0.9")
    )
    told = refusal(
        path,
        "algorithm.policy_loss=gspo",
        "algorithm.policy_loss.dual=3",
        "algorithm.importance_sampling.cap=3",
    )
    assert "algorithm.policy_loss.dual=3 needs algorithm.policy_loss.type=clip, not gspo" in told
    assert (
        "algorithm.importance_sampling.cap=3 needs algorithm.importance_sampling.type=token or sequence or mask"
        in told
    )
    assert "Did you mean algorithm.advantage.scale_by_std?" in refusal(
        path, "algorithm.advantage.scale_by_sdt=1"
    )


def test_values_of_a_part_are_checked_as_all_others(path: Path) -> None:
    assert "algorithm.policy_loss.low='x' must be a number." in refusal(
        path, "algorithm.policy_loss.low=x"
    )
    given = [
        "algorithm.importance_sampling=token",
        "algorithm.importance_sampling.cap=0.5",
        "algorithm.policy_loss.low=1",
    ]
    found = violations(load(path, [*given, "algorithm.kl.estimator=k4"]), 1, data=False)
    assert found == [
        "algorithm.kl.estimator=k4 is unknown. Choose one of: k1, k2, k3, unbiased.",
        "algorithm.policy_loss.low=1.0 must be below 1.",
        "algorithm.importance_sampling.cap=0.5 must be at least 1.",
    ]


def test_another_type_begins_a_part_anew_and_the_same_goes_on(path: Path) -> None:
    assert (
        load(path, ["algorithm.recipe=gspo", "algorithm.policy_loss=clip"]).algorithm.policy_loss
        == Clip()
    )
    kept = load(
        path, ["algorithm.recipe=gspo", "algorithm.policy_loss.low=0.1"]
    ).algorithm.policy_loss
    assert kept == GSPO(low=0.1, high=4e-4)
    path.write_text(
        "model: {path: x}\nalgorithm: {recipe: cpgd, policy_loss: {type: cpgd, high: 0.5}}\n"
    )
    assert load(path).algorithm.policy_loss == CPGD(high=0.5, drift_coef=0.01)


def test_a_recipe_may_be_a_file_found_from_the_working_directory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path.parent / "mine").mkdir()
    (path.parent / "mine" / "a.yaml").write_text(
        "algorithm: {importance_sampling: {type: token, cap: 3}}\ntrainer: {seed: 4}\n"
    )
    path.write_text("model: {path: x}\nalgorithm: {recipe: mine/a.yaml}\ntrainer: {seed: 5}\n")
    assert f"but there is {path.parent}/mine/a.yaml" in refusal(path)
    monkeypatch.chdir(path.parent)
    config = load(path)
    assert (config.algorithm.importance_sampling, config.trainer.seed) == (
        TokenImportance(cap=3.0),
        5,
    )
    path.write_text("model: {path: x}\n")
    assert load(path, ["algorithm.recipe=mine/a.yaml"]).trainer.seed == 4
    assert "no config file" in refusal(path, "algorithm.recipe=mine/b.yaml")
    assert "Did you mean gspo?" in refusal(path, "algorithm.recipe=gsop")


def test_every_former_name_is_refused_with_one_that_there_is(path: Path) -> None:
    for former, now in RENAMED.items():
        assert now in options(), former
        assert former not in options(), former
        assert f"{former} is now {now}." in refusal(path, f"{former}=1")
        section, _, leaf = former.partition(".")
        path.write_text(f"model: {{path: x}}\n{section}: {{{leaf}: 1}}\n")
        assert f"{former} is now {now}." in refusal(path)
        path.write_text("model: {path: x}\n")


def test_every_removed_option_is_refused_with_the_reason(path: Path) -> None:
    for former, why in REMOVED.items():
        assert former not in options()
        assert f"{former} was removed. {why} Remove it." in refusal(path, f"{former}=1")


def test_other_systems_options_that_truncate_sampling_are_refused_with_where_they_may_be(
    path: Path,
) -> None:
    for name in ("top_p", "top_k", "min_p"):
        said = refusal(path, f"rollout.{name}=0.9")
        assert "sampled from the whole vocabulary" in said
        assert f"trainer.eval_{name}" in said
        assert f"trainer.eval_{name}" in options()


def test_every_former_type_is_refused_with_one_that_there_is(path: Path) -> None:
    for (name, former), now in RENAMED_TYPES.items():
        assert now in unions()[name.removesuffix(".type")]
        assert f"{name}={former} is now {name}={now}." in refusal(path, f"{name}={former}")
    assert (
        "algorithm.surrogate is now algorithm.policy_loss.type. Write algorithm.policy_loss.type=clip"
        in refusal(path, "algorithm.surrogate=ppo")
    )


def test_the_functions_are_those_of_the_options() -> None:
    """All parts of the config's unions have a function, and no other built-in class has one."""
    assert advantages and losses and environments  # which register theirs
    found = unions()
    preferences = set(found.pop("algorithm.preference").values())
    assert {*preference.LOSSES, KTO} == preferences
    del found["rollout.speculative"]  # vLLM implements them
    known = {part for parts in found.values() for part in parts.values()}
    assert {part for part in IMPLEMENTATIONS if part.__module__.startswith("rftmega.")} == known
    for part in known | preferences:
        assert part().type == choices_of(part.__annotations__["type"])[0]


def test_a_part_has_one_function_and_a_kind() -> None:
    with pytest.raises(ValueError, match="GroupNorm has a function already: group_norm"):
        implements(GroupNorm)
    with pytest.raises(
        TypeError, match="is no part of an algorithm: inherit from one of Advantage, PolicyLoss"
    ):
        implements(int)
    with pytest.raises(TypeError):
        implements(Advantage)


def test_the_reference_tells_of_every_part_with_its_options() -> None:
    told = option_reference()
    assert "algorithm.advantage.type = group_norm" in told
    for name, parts in unions().items():
        for tag in parts:
            assert f"{name}: {{type: {tag}}}" in told
    for option in walk():
        if option.part:
            assert f"{option.name} = " in told
    assert len(RunConfig.__dataclass_fields__) > 5


def test_a_misspelt_option_of_a_listed_section_is_named(path: Path) -> None:
    said = refusal(path, "algorithm.teachers=[{path: x}, {path: y, divergenc: jsd}]")
    assert said.endswith("divergenc is none of them. Did you mean divergence?")
    assert "algorithm.teachers=[{'path': 'x'}" in said
