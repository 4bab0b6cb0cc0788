import pytest

import stepcache as sc


@pytest.fixture(scope="module", params=["1x2", "2x1"])
def session(request):
    """A session on one task of two devices, and one on two tasks of one."""
    with sc.Session(target=f"local:{request.param}") as made:
        yield made
    made.close()


@pytest.fixture(scope="module")
def one_task():
    with sc.Session(target="local:1x2") as made:
        yield made
    made.close()
