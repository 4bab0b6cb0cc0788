"""Which tests run by default, of those that are too many."""

import pytest

LEFT_OUT = pytest.StashKey[list[pytest.Item]]()
"""Of `config.stash`: the tests that are not run because they are slow."""


def slow_is_asked_for(config: pytest.Config) -> bool:
    return "slow" in (config.option.markexpr or "")
