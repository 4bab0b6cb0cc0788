"""How one kind of change is written down: a program whose text has two versions.

`«before¦after»` in the text is what changes. Lines `# --- name` begin another file, beside the
program or in a folder below it; the first file is the program, a module that has a `step`.
"""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

_CHOICE = re.compile("«(.*?)¦(.*?)»", re.DOTALL)
_PRELUDE = "import jax, jax.numpy as jnp, numpy as np\nfrom pathlib import Path\n"


@dataclass(frozen=True)
class Kind:
    """One kind of change.

    Attributes:
        name: of the kind, and of the module.
        text: the program in both versions.
        named: what the account of the miss has to contain: the name of what changed, or of what
            cannot be vouched for.
        vouched: whether an unchanged program is found again without a trace.
        level: the best level that the changed program may reach, and a harmless one does reach.
        same: the change does not change the result, only what the program depends on.
        unstable: each trace changes what the next would read.
    """

    name: str
    text: str
    named: str = ""
    vouched: bool = True
    level: int = 2
    same: bool = False
    unstable: bool = False

    def write(self, directory: Path, version: int) -> None:
        """Writes the files of version 0 or 1 into a directory."""
        text = _CHOICE.sub(lambda found: found.group(version + 1), textwrap.dedent(self.text))
        main, *others = re.split(r"^# --- ", text, flags=re.MULTILINE)
        directory.mkdir(parents=True)
        (directory / f"{self.name}.py").write_text(_with_prelude(main))
        for other in others:
            name, _, content = other.partition("\n")
            (directory / name.strip()).parent.mkdir(parents=True, exist_ok=True)
            (directory / name.strip()).write_text(
                _with_prelude(content) if name.strip().endswith(".py") else content
            )


def _with_prelude(text: str) -> str:
    future = "from __future__ import annotations\n"
    return future + _PRELUDE + text.replace(future, "") if future in text else _PRELUDE + text
