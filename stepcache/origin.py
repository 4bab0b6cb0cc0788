"""Where a piece of code comes from: the user's own files, an installed package, or Python.

It names steps and source lines, and says which lines are the user's. It decides no program.
"""

from __future__ import annotations

import functools
import os
import sysconfig
from pathlib import Path

from stepcache import errors

_OWN_PACKAGE = os.path.dirname(os.path.abspath(errors.__file__)) + os.sep
_SITE_NAMES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_LIBRARIES = tuple(
    {
        place + os.sep
        for name in ("stdlib", "platstdlib")
        if (path := sysconfig.get_paths().get(name))
        for place in (path, os.path.realpath(path))
    }
)


@functools.lru_cache(maxsize=8192)
def is_users_file(filename: str) -> bool:
    """Whether code is the user's own. Code without a file, as of a notebook, is.

    An editable install is the user's own code, too.
    """
    if any(site in filename for site in _SITE_NAMES):
        return False
    return not filename.startswith((_OWN_PACKAGE, "<frozen ", *_LIBRARIES))


@functools.lru_cache(maxsize=8192)
def file_label(filename: str, module: str | None = None) -> str:
    """How to name a file, whatever directory the checkout is in: `package/model.py`."""
    if filename.startswith("<") or "ipykernel" in filename:
        return "<cell>" if module in (None, "__main__") else module.replace(".", "/") + ".py"
    path = Path(filename)
    depth = 1
    if module and module != "__main__":
        depth = module.count(".") + (2 if path.name == "__init__.py" else 1)
    return "/".join(path.parts[-depth:])
