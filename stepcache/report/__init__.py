"""Reports: explanations of calls, progress of builds, contents of caches, what runs did."""

from typing import NoReturn

from stepcache.errors import OptionError


def __getattr__(name: str) -> NoReturn:
    if name == "plan_svg":
        raise OptionError("plan_svg is gone", expected="print(step.explain(...))", where=name)
    raise AttributeError(name)
