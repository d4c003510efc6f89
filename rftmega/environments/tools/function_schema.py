"""Derives a tool's spec from a Python function: the JSON schema from its signature, the description
from its docstring.
"""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, NotRequired, Required, get_type_hints

import docstring_parser
from docstring_parser.common import Docstring
from pydantic import ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from rftmega.core.errors import ConfigError
from rftmega.environments.tools.tool import ToolError, ToolSpec

OPTION = "environment.tools"
PLAIN = "str, int, float, bool, list[...], dict[str, ...], Literal, or one of them | None"


class FunctionSchema:
    """FunctionSchema holds the tool spec of one function and validates the function's arguments."""

    def __init__(self, function: Callable[..., Any], name: str, *, bound: bool = False):
        """`name`: the tool's name. `bound`: the function is a method, whose first argument is
        `self`.

        Raises ConfigError if no spec can be derived from the docstring or signature.
        """
        self.name = name
        docstring = docstring_parser.parse(inspect.getdoc(function) or "")
        description = description_told(docstring)
        if not description:
            raise ConfigError(
                f"{OPTION}: {name} has no docstring. Its first paragraph is what the model is told of it."
            )
        try:
            signature = inspect.signature(function)
            hints = get_type_hints(function, include_extras=True)
        except (ValueError, TypeError, NameError) as error:
            raise ConfigError(
                f"{OPTION}: the signature of {name} can't be read: {error}."
            ) from error
        parameters = list(signature.parameters.values())[bound:]
        told = {each.arg_name: each.description or "" for each in docstring.params}
        fields = {
            each.name: _field(each, hints, told.get(each.name, ""), name) for each in parameters
        }
        self._adapter = _adapter(name, fields)
        self.spec = ToolSpec(name, description, self._schema(signature))

    def _schema(self, signature: inspect.Signature) -> dict[str, Any]:
        try:
            whole: dict[str, Any] = self._adapter.json_schema()
        except PydanticUserError as error:
            raise _unfit(self.name, "an argument", error) from error
        if "$defs" in whole:
            classes = ", ".join(sorted(whole["$defs"]))
            raise ConfigError(
                f"{OPTION}: {self.name} takes {classes}, a class of its own. Take its parts as arguments: {PLAIN}."
            )
        schema: dict[str, Any] = _without_titles(whole)
        properties: dict[str, Any] = schema.setdefault("properties", {})
        for name, told in properties.items():
            default = signature.parameters[name].default
            if isinstance(default, str | int | float | bool):
                told["default"] = default
        return schema

    def read(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Converts a call's arguments to the types in the function's annotations: 3.0 becomes 3 for
        an int.

        Raises ToolError if the arguments are invalid.
        """
        try:
            fitting: dict[str, Any] = self._adapter.validate_python(arguments)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = "".join(f"[{step!r}]" for step in first["loc"])
            raise ToolError(
                f"wrong arguments of {self.name}: arguments{where}: {first['msg']}"
            ) from None
        return fitting


def description_told(docstring: Docstring) -> str:
    """Returns the tool's description: the first paragraph of the function's docstring as one line."""
    told = docstring.short_description or ""
    if not docstring.blank_after_short_description and docstring.long_description:
        told += " " + docstring.long_description.split("\n\n")[0]
    return " ".join(told.split())


def _adapter(name: str, fields: dict[str, Any]) -> TypeAdapter[Any]:
    """Returns a validator of the arguments of the function `name`, which rejects unknown arguments.

    `fields`: argument name -> annotation.
    """
    typed_dict: Any = TypedDict  # a type checker wants it with a name that is written out
    arguments = typed_dict(name, fields)
    arguments.__pydantic_config__ = ConfigDict(extra="forbid")
    try:
        return TypeAdapter(arguments)
    except PydanticUserError as error:
        raise _unfit(name, "an argument", error) from error


def _field(parameter: inspect.Parameter, hints: dict[str, Any], told: str, name: str) -> Any:
    """Returns the type annotation of an argument of the function `name`, together with its
    description, for pydantic.

    `hints`: the function's type hints by argument; `told`: the argument's description in the
    docstring. Raises ConfigError if the argument has no annotation, or can't be passed by name.
    """
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise ConfigError(
            f"{OPTION}: {name} takes {parameter}, but a model gives arguments by their names. Write them out."
        )
    if parameter.name not in hints:
        raise ConfigError(
            f"{OPTION}: the argument {parameter.name} of {name} has no annotation. Annotate it: {PLAIN}."
        )
    hint: Any = hints[parameter.name]
    if told:
        hint = Annotated[hint, Field(description=" ".join(told.split()))]
    return Required[hint] if parameter.default is parameter.empty else NotRequired[hint]


def _unfit(name: str, what: str, error: Exception) -> ConfigError:
    first = str(error).splitlines()[0]
    return ConfigError(
        f"{OPTION}: {what} of {name} has a type that JSON has not ({first}). Take: {PLAIN}."
    )


def _without_titles(schema: Any, *, names: bool = False) -> Any:
    """Returns a JSON schema without the titles that pydantic adds.

    `names`: whether the keys of `schema` are names of arguments, so that a key "title" is kept.
    """
    if isinstance(schema, list):
        return [_without_titles(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_titles(value, names=key == "properties" and not names)
        for key, value in schema.items()
        if names or key != "title" or not isinstance(value, str)
    }
