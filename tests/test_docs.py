"""The pages show what happens, and figures that were measured; examples run."""

import inspect
import re
from pathlib import Path

import pytest

import stepcache as sc
from benchmarks import figures
from stepcache import cli
from tests.serving.servers import LocalServer

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
CODE = re.compile(r"(<!-- not run: [^>]+ -->\n)?```python\n(.*?)```", re.S)


@pytest.mark.parametrize("page", figures.pages(), ids=lambda page: page.stem)
def test_figures_are_those_of_the_results(page):
    text = page.read_text(encoding="utf-8")
    assert figures.written(text) == text, "python -m benchmarks.figures writes them anew"


def test_each_block_of_figures_stands_on_a_page():
    texts = [page.read_text(encoding="utf-8") for page in figures.pages()]
    assert {found["name"] for text in texts for found in figures.BLOCK.finditer(text)} == set(
        figures.BLOCKS
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_ratio_or_time_stands_outside_of_a_block(page):
    """Whoever measures something commits the result, and lets the block be written."""
    text = figures.BLOCK.sub("", page.read_text(encoding="utf-8"))
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    found = re.findall(r".*\d (?:×|µs|ms)(?!\w).*", text)
    assert [line for line in found if "setswitchinterval" not in line] == []


# What the examples of a page, or of a docstring, take as given.
GIVEN = """
import jax, jax.numpy as jnp, numpy as np, optax
import stepcache as sc
batch = {"ids": np.arange(4), "x": np.ones((4, 3), np.float32)}
batches = [batch] * 2
def init():
    return {"w": np.ones(3, np.float32)}
w, gradient, step_number = init()["w"], init()["w"], 3
@sc.step
def gradients(params, batch):
    return jax.tree.map(jnp.ones_like, params)
@sc.step(carry="params", batch="batch")
def train_step(params, batch):
    return params, jnp.mean(batch["x"])
def loss_fn(params, batch):
    return jnp.mean(batch["x"] @ params["w"])
params = init()
"""
SERVED = """
step = gradients
connection = server = sc.connect(address)
"""
ROWS = """
connection = server = sc.connect(address)
table = users = server.table("rows", 100, (3,), optimizer=sc.RowOptimizer("adagrad", 0.1))
rows = users.lookup(batch["ids"])
@sc.step
def step(params, rows, batch):
    return jnp.float32(0), jnp.ones_like(rows.values)
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    server = LocalServer(tmp_path_factory.mktemp("docs") / "server").start()
    yield server.address
    server.stop()


def run(code, names):
    exec(compile(code.replace("1_000_000", "1_000"), "example", "exec"), names)


def python_blocks(page):
    blocks = CODE.findall(page.read_text(encoding="utf-8"))
    return [code for is_not_run, code in blocks if not is_not_run]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.stem
)
def test_examples_of_a_page_run(page, address, tmp_path, monkeypatch):
    """All in one namespace, in order; those that cannot run say why in a comment before them."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page.stem, "address": address}
    if page.stem == "served-variables":
        run(GIVEN + ROWS, names)
    for code in python_blocks(page):
        run(code, names)


SAVES = 'params = moments = sc.Variables(init(), name="params"); step = 3\n'
TABLE = 'table = sc.Variables(init(), write=sc.Write("add"))\n'
MODULES = """
from flax import nnx
import equinox as eqx
class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(3))
def of_nnx(model, batch):
    return jnp.mean(batch["x"] @ model.w[...])
"""
EQUINOX = """
import equinox as eqx
optimizer, loss_fn = optax.sgd(0.1), lambda model, batch: jnp.mean(jax.vmap(model)(batch["x"]))
"""
BEFORE = {
    "Pad": "loss_of_each, update, state = lambda s, b: b['x'][:, 0], lambda s, *_: s, init()\n",
    "Step.repeat": "state = init(); batches = jax.tree.map(lambda x: np.stack([x] * 100), batch)\n",
    "Variables.assign": "params = sc.Variables(init())\n",
    "advise": "params = sc.Variables(init())\n",
    "Variables.flush": TABLE,
    "connect": SERVED,
    "Connection.variables": SERVED,
    "Connection.table": SERVED,
    "Table": ROWS,
    "Rows": ROWS,
    "save": SAVES,
    "restore": SAVES + 'sc.save("saves", params=params, moments=moments, step=step)\n',
    "DeploymentConfig": "",
    "nnx": MODULES + "loss_fn = of_nnx\n",
    "nnx.step": "from stepcache import nnx as snnx\n"
    + MODULES
    + "model, optimizer = Model(), None\n",
    "equinox": EQUINOX,
    "equinox.step": "from stepcache import equinox as seqx\n" + EQUINOX,
}


def documented():
    """Everything with a docstring in the public API, by its name."""
    from stepcache import equinox, nnx
    from stepcache.serving import connection, lookup

    found = {name: getattr(sc, name) for name in sc.__all__}
    found |= {"Connection": connection.Connection, "Table": lookup.Table, "Rows": lookup.Rows}
    found |= {"nnx": nnx, "nnx.step": nnx.step, "equinox": equinox, "equinox.step": equinox.step}
    for name, value in list(found.items()):
        if inspect.isclass(value):
            members = inspect.getmembers(value, inspect.isfunction)
            found |= {f"{name}.{key}": each for key, each in members if not key.startswith("_")}
    return found


def examples(value):
    """The code in a docstring: its indented paragraphs."""
    paragraphs = re.split(r"\n\s*\n", inspect.getdoc(value) or "")
    return [each for each in paragraphs if all(line[:4].isspace() for line in each.splitlines())]


EXAMPLES = {name: found for name, each in documented().items() if (found := examples(each))}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_of_a_docstring_run(name, address, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "examples", "address": address}
    run(GIVEN + BEFORE.get(name, ""), names)
    if name == "connect":
        monkeypatch.setattr(sc, "connect", lambda _: names["server"])
    for code in EXAMPLES[name]:
        run(inspect.cleandoc("\n" + code), names)


def test_the_page_of_the_api_names_everything():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^::: stepcache\.(?:step\.)?(\w+)$", text, re.M))
    errors = {name for name in sc.__all__ if _is_exception(getattr(sc, name))}
    assert named >= set(sc.__all__) - errors, "what is public is on the page"
    assert "errors" in named


def _is_exception(value):
    return inspect.isclass(value) and issubclass(value, Exception)


def test_each_command_is_on_the_page_of_operations():
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    commands = cli.main.commands | cli.cache.commands  # Hidden ones say what is in their place.
    for name in {name for name, each in commands.items() if not each.hidden} - {"cache"}:
        assert re.search(rf"^\| .*`(?:stepcache (?:cache )?)?{name}`.* \|", text, re.M), name


def test_the_picture_names_what_the_table_names():
    picture = (ROOT / "docs" / "what-is-cached.svg").read_text(encoding="utf-8")
    for name in ("dispatcher", "memory", "disk", "shared cache", "build", "host", "server"):
        assert f">{name}<" in picture
