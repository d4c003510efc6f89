"""Which parameters of a file's tests are run, for what is made once for all of them."""

import pytest


def chosen(request: pytest.FixtureRequest, name: str) -> list[str]:
    """Returns the values of the parameter `name` of this file's tests that are to run, each once."""
    calls = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    return list(dict.fromkeys(params[name] for params in calls if name in params))
