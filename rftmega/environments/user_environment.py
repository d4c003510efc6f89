"""The environment that a user passes to rftmega.train in Python."""

from typing import Any

from rftmega.config.options.environments import GivenEnvironment, environment_given
from rftmega.config.options.parts import implements
from rftmega.core.interfaces import Environment


@implements(GivenEnvironment)
def given_environment(options: GivenEnvironment, tokenizer: Any) -> Environment:
    """Returns the environment that the user passed to rftmega.train: an object as it is, a class
    instantiated with the tokenizer.
    """
    given = environment_given(options.name)
    environment: Environment = given(tokenizer) if isinstance(given, type) else given
    return environment
