import importlib
import sys
import textwrap

import pytest

from stepcache.fingerprint import installed_packages, provenance
from tests.programs.starts import unload


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package of the given files for one test, as if this process began later."""
    monkeypatch.setattr(installed_packages, "was_read_after_ns", lambda module: sys.maxsize)
    site = tmp_path / "site-packages"
    monkeypatch.syspath_prepend(str(site))
    installed = []

    def install_package(name, files, is_distributed=True):
        texts = {site / name / file: textwrap.dedent(text) for file, text in files.items()}
        about = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        if is_distributed:
            texts[site / f"{name}-1.0.dist-info" / "METADATA"] = about
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        importlib.invalidate_caches()
        provenance.distribution_of.cache_clear()
        installed.append(name)

    yield install_package
    for name in installed:
        unload(name)
    installed_packages.look_again()  # Else the next step of this process would be traced twice.
