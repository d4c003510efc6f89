"""Keeps vLLM's changes to model classes of the transformers library away from a trainer in the same
process.

For an architecture that vLLM does not implement itself, vLLM builds the transformers model and
changes its class so that torch.compile handles it: it adds a base class, `__init__` and `__call__`.
A trainer's model of the same class would then fail in its next forward pass, and no further one
could be built.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.nn import Module
from vllm.model_executor.models.transformers import base as transformers_models

_MISSING = object()


class _Before(NamedTuple):
    """_Before holds the base classes and attributes that a class had before vLLM changed it."""

    bases: tuple[type, ...]
    attributes: dict[str, Any]


class ChangedClasses:
    """ChangedClasses records the classes of transformers that vLLM changes while it builds a model,
    and undoes the changes for all other models.
    """

    def __init__(self) -> None:
        self._before: dict[type, _Before] = {}

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Context manager around the construction of vLLM's model: records the classes that vLLM
        changes in it, and restores these classes if the block fails.
        """
        models: Any = transformers_models
        decorator = models.support_torch_compile

        def remembering(**options: Any) -> Callable[[type], type]:
            def decorate(of: type) -> type:
                before = _Before(of.__bases__, dict(vars(of)))
                changed: type = decorator(**options)(of)
                if of.__bases__ != before.bases:  # it had not been changed already
                    self._before[of] = before
                return changed

            return decorate

        models.support_torch_compile = remembering
        try:
            yield
        except BaseException:
            self.give_to(Module())
            raise
        finally:
            models.support_torch_compile = decorator

    def give_to(self, model: Module) -> None:
        """Restores the changed classes, and gives `model`, vLLM's model, subclasses of them that
        have the changes.
        """
        for of, before in self._before.items():
            changes = {
                name: value
                for name, value in vars(of).items()
                if before.attributes.get(name, _MISSING) is not value
                and name not in ("__dict__", "__weakref__", "__doc__")
            }
            further = tuple(each for each in of.__bases__ if each not in before.bases)
            for name in changes:
                if name in before.attributes:
                    setattr(of, name, before.attributes[name])
                else:
                    delattr(of, name)
            of.__bases__ = before.bases
            mine = type(of.__name__, (of, *further), changes | {"__module__": of.__module__})
            for module in model.modules():
                if type(module) is of:
                    module.__class__ = mine
        self._before.clear()
