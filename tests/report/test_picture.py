import itertools
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import stepcache as sc
from stepcache.report import picture, plan_svg
from stepcache.report.explanation import Explanation
from stepcache.report.picture import lanes, savings, totals
from stepcache.report.svg import printable, text_width, wrapped
from stepcache.units import listed, readable_bytes
from stepcache.variables.plan import DEVICE_LINK, HOST_LINK, Extent, Plan, Transfer

NAMESPACE = "{http://www.w3.org/2000/svg}"
ROUTES = ("each", "fanout", "gather", "scatter", "none", "resident")
MIDDLE = 24 + 500 + 14  # Between the two panels.


# ---- plans, and what is drawn of them --------------------------------------------------------


def transfer(route, devices=8, size=8_000_000, variable="params", readers=("state",), **fields):
    """A transfer whose bytes are those of its route."""
    host = {"each": size * devices, "fanout": size, "gather": size, "scatter": size}.get(route, 0)
    device = size * (devices - 1) if route in ("fanout", "gather") else 0
    links = tuple(pair for pair in ((HOST_LINK, host), (DEVICE_LINK, device)) if pair[1])
    source = "devices" if route in ("scatter", "resident") else "host"
    fields = {"version": 3, "why": "asked for", **fields}
    return Transfer(
        variable,
        source=source,
        target="host" if route == "scatter" else "devices",
        route="none" if route == "resident" else route,
        readers=readers,
        link_bytes=links,
        extent=Extent(size, size * devices, devices),
        **fields,
    )


def explained(*transfers, mesh=None, step="train_step"):
    return Explanation(step, True, None, mesh, build_seconds=(0, 0, 0), plan=Plan(transfers))


class Line(NamedTuple):
    """A line of text, and the box that it takes."""

    text: str
    left: float
    top: float
    right: float
    bottom: float


def lines_of(svg: str) -> list[Line]:
    return [_line(node) for node in ElementTree.fromstring(svg).iter(f"{NAMESPACE}text")]


def _line(node) -> Line:
    size, x, y = (float(node.get(name)) for name in ("font-size", "x", "y"))
    width = text_width(node.text, size, node.get("font-weight") == "bold")
    left = x - width / 2 if node.get("text-anchor") == "middle" else x
    return Line(node.text, left, y - 0.8 * size, left + width, y + 0.25 * size)


class Arrow(NamedTuple):
    kind: str
    points: list[tuple[float, float]]
    width: float


def arrows_of(svg: str) -> list[Arrow]:
    """The arrows with a head, without the first two: those are the legend's."""
    paths = list(ElementTree.fromstring(svg).iter(f"{NAMESPACE}path"))
    found = []
    for line, head in itertools.pairwise(paths):
        if head.get("class").endswith("head"):
            width = float(line.get("stroke-width"))
            found.append(Arrow(line.get("class").split()[0], _points(line), width))
    return found[2:]


def _points(path) -> list[tuple[float, float]]:
    numbers = [float(each) for each in re.findall(r"-?[\d.]+", path.get("d"))]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def words(svg: str) -> str:
    return "\n".join(line.text for line in lines_of(svg))


def count(svg: str, kind: str, planned: bool) -> int:
    return sum(
        arrow.kind == kind and (arrow.points[0][0] > MIDDLE) is planned for arrow in arrows_of(svg)
    )


# ---- calls of steps --------------------------------------------------------------------------

TREE = {"w": np.ones((64, 64), np.float32), "b": np.ones(64, np.float32), "n": np.ones(3, np.int32)}


@sc.step(carry="state")
def train_step(state, batch):
    return state, batch.sum()


@sc.step
def compare(a, b):
    return a["w"].sum() + b["w"].sum()


def on_host(name="moments", placement=None, **read):
    placement = placement or sc.OnHost()
    return sc.Variables(TREE, placement=placement, read=sc.Read(**read), name=name)


def sharded(axis):
    return sc.OnHost(on_device=sc.Sharded([("w", P(axis)), ("b|n", P())]))


def plans(mesh) -> Iterator[Explanation]:
    """Explanations of calls that move variables in all the ways there are."""
    batch = np.ones((8, 2), np.float32)
    with sc.Session(mesh):
        yield train_step.explain(sc.Variables(TREE), batch)
        for route in ("auto", "each", "fanout", "gather"):
            yield train_step.explain(on_host(route=route), batch)
            yield compare.explain(on_host(route=route), on_host("other", route=route))
        cached = on_host(cache="device")
        yield compare.explain(cached, cached)
        compare(cached, cached)
        yield compare.explain(cached, cached)
        ahead = on_host(prefetch=1)
        yield compare.explain(ahead, ahead)
        compare(ahead, ahead)
        yield compare.explain(ahead, ahead)
        axis = mesh.axis_names[0]
        split = on_host(placement=sharded(axis), route="fanout")
        yield train_step.explain(split, batch)


def test_the_numbers_are_the_plans_own(mesh, one_device_mesh):
    for explanation in itertools.chain(plans(mesh), plans(one_device_mesh)):
        drawn = lanes(explanation.plan)
        planned, naive = (
            totals(getattr(lane, at) for lane in drawn) for at in ("planned", "naive")
        )
        links = explanation.plan.link_bytes
        assert (planned.host_bytes, planned.device_bytes) == tuple(
            links.get(link, 0) for link in (HOST_LINK, DEVICE_LINK)
        )
        assert naive.host_bytes >= planned.host_bytes and naive.device_bytes == 0
        right = [line.text for line in lines_of(plan_svg(explanation)) if line.left > MIDDLE]
        for link, size in links.items():
            assert f"{link}: {readable_bytes(size)}" in right
        assert savings(naive, planned) in words(plan_svg(explanation))


def test_two_readers_of_one_variable(mesh):
    with sc.Session(mesh):
        table = on_host("table")
        explanation = compare.explain(table, table)
    (planned,) = explanation.plan.transfers
    size = table.nbytes
    assert planned.extent == Extent(size, size * 8, 8)
    (lane,) = lanes(explanation.plan)
    assert lane.naive.moved.host_bytes == 2 * 8 * size
    svg = plan_svg(explanation)
    assert count(svg, "host", planned=False) == 16
    assert f"16 × {readable_bytes(size)} = {readable_bytes(16 * size)}" in words(svg)
    assert "One transfer serves a and b" in " ".join(words(svg).split())
    assert "device 7 · b" in words(svg)


def test_a_value_that_is_split_over_devices(mesh):
    with sc.Session(mesh):
        split = on_host(placement=sharded("data"), route="fanout")
        explanation = compare.explain(split, split)
    extent = explanation.plan.transfers[0].extent
    small = TREE["b"].nbytes + TREE["n"].nbytes
    assert extent == Extent(split.nbytes, 2 * TREE["w"].nbytes + 8 * small, 8)
    assert count(plan_svg(explanation), "host", planned=True) == 8


def test_host_adam_is_read_and_written(mesh):
    with sc.Session(mesh):
        svg = plan_svg(train_step.explain(on_host(), np.ones((8, 2), np.float32)))
    planned = [arrow for arrow in arrows_of(svg) if arrow.points[0][0] > MIDDLE]
    back = [each for each in planned if each.kind == "host" and each.points[1] < each.points[0]]
    assert len(back) == 8
    text = words(svg)
    assert "version 0" in text and "version 1" in text and "written by state" in text
    assert "gather: " in text and "scatter: every share crosses once" in text
    assert "Other arguments move" in text


def test_what_lives_on_the_devices_does_not_move():
    state = sc.Variables(TREE, name="params")
    svg = plan_svg(train_step.explain(state, np.ones((8, 2), np.float32)))
    assert not arrows_of(svg)
    text = words(svg)
    assert text.count("Nothing moves: the master copy is there.") == 1
    assert "Nothing crosses the host's link, either way." in text
    drawn = list(ElementTree.fromstring(svg).iter(f"{NAMESPACE}rect"))
    assert len(drawn) == 2  # The paper, and what is behind the row's name.
    assert not {"Naive", "Planned", HOST_LINK, DEVICE_LINK, "host memory"} & {*text.splitlines()}


@pytest.mark.parametrize("explanation", [explained(), Explanation("f", False, None, None)])
def test_without_variables_nothing_is_planned(explanation):
    svg = plan_svg(explanation)
    assert "Nothing is planned: the call passes no Variables." in words(svg)
    assert not arrows_of(svg)


def test_a_call_without_variables(mesh):
    with sc.Session(mesh):
        svg = plan_svg(train_step.explain({"w": TREE["w"]}, TREE["w"]))
    assert "Nothing is planned" in words(svg) and "Other arguments move" in words(svg)


# ---- what is drawn ---------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2, 8, 64])
@pytest.mark.parametrize("route", ROUTES)
def test_routes_are_drawn_as_what_they_are(route, devices):
    svg = plan_svg(explained(transfer(route, devices)))
    drawn = min(devices, 9)  # Eight, and one for the others.
    others = 0 if devices == 1 else drawn
    host = {"fanout": 1, "none": 0, "resident": 0}.get(route, drawn)
    assert ("Nothing moves: asked for." in words(svg)) is (route in ("none", "resident"))
    device = {"fanout": drawn - 1, "gather": others}.get(route, 0)
    assert (count(svg, "host", True), count(svg, "device", True)) == (host, device)
    assert count(svg, "host", False) == (0 if route == "resident" else drawn)
    assert count(svg, "device", False) == 0
    assert ("… and 56 more" in words(svg)) is (devices == 64 and route != "resident")


def test_the_columns_are_naive_and_planned():
    text = words(plan_svg(explained(transfer("gather"))))
    assert {"Naive", "Planned"} <= {*text.splitlines()}
    assert "before" not in text.lower() and "after" not in text.lower()


def test_what_serves_without_moving_has_no_drawing(mesh):
    svg = plan_svg(explained(transfer("none")))
    bands = [
        float(node.get("x"))
        for node in ElementTree.fromstring(svg).iter(f"{NAMESPACE}rect")
        if node.get("class") == "band"
    ]
    assert len(bands) == 2 and max(bands) < MIDDLE


@pytest.mark.parametrize("wire", [None, "bf16", "int8"])
def test_the_wire_is_named(wire, mesh):
    with sc.Session(mesh):
        explanation = compare.explain(on_host(wire=wire), sc.Variables(TREE))
    (planned, _) = explanation.plan.transfers
    assert planned.wire == (wire or "")
    text = " ".join(words(plan_svg(explanation)).split())
    assert (f"; as {wire} on the wire, off by at most" in text) is (wire is not None)
    assert ("on each of 8 devices, uncoded" in text) is (wire is not None)
    assert (f"by gather in {wire} (" in " ".join(str(explanation).split())) is (wire is not None)


def test_every_number_of_bytes_says_what_it_is():
    """A figure is in words, counts arrows under the name of a link, or is in the host's memory."""
    svg = plan_svg(explained(*map(transfer, ROUTES)))
    assert "In the host's memory: the bytes of the value" in " ".join(words(svg).split())
    lines = lines_of(svg)
    for above, line in itertools.pairwise(lines):
        if not re.search(r"\d [kMG]?B\b", line.text):
            continue
        if " × " in line.text and "link" not in line.text:
            assert above.text in (HOST_LINK, DEVICE_LINK)
        elif re.fullmatch(r"[\d.]+ [kMG]?B", line.text):
            assert 32 <= (line.left - 24) % (MIDDLE - 10) + 24 <= 136, line
        else:
            assert re.match(
                rf"version|{HOST_LINK}: |{DEVICE_LINK}: |.* planned, .* naive", line.text
            )


def test_every_transfer_appears():
    planned = [
        transfer(route, variable=f"variable {number}", version=number)
        for number, route in enumerate(ROUTES)
    ]
    svg = plan_svg(explained(*planned))
    description = ElementTree.fromstring(svg).find(f"{NAMESPACE}desc").text
    for each in planned:
        assert each.variable in words(svg) and each.variable in description
        assert f"version {each.version} · 8.0 MB" in words(svg)
        assert each.why in words(svg)
    assert [words(svg).count(f"{route}: ") for route in ROUTES[:4]] == [1] * 4


def test_arrows_grow_with_bytes_within_bounds():
    sizes = [10**power for power in range(1, 14)]
    svg = plan_svg(explained(*(transfer("each", 1, size) for size in sizes)))
    widths = [arrow.width for arrow in arrows_of(svg) if arrow.points[0][0] > MIDDLE]
    assert widths == sorted(widths) and widths[-1] > 3 * widths[0]
    assert widths[0] >= 1 and widths[-1] <= 6


def test_what_was_fetched_ahead_is_counted_once():
    ahead = transfer("gather", why="the value crosses once, ahead of the next step")
    drawn = lanes(Plan((transfer("none", why="it was prefetched"), ahead)))
    assert [lane.naive.moved.host_bytes for lane in drawn] == [0, 64_000_000]
    cached = lanes(Plan((transfer("none", why="a copy is there"),)))
    assert [lane.naive.moved.host_bytes for lane in cached] == [64_000_000]


@pytest.mark.parametrize(
    ("name", "shown"),
    [("<a&b>", "<a&b>"), ("\"'", "\"'"), ("a\nb", "a b"), ("a\x00\ud800b", "a\ufffd\ufffdb")],
)
def test_names_are_escaped(name, shown):
    planned = transfer("each", variable=name, readers=(name, "b"), why=name)
    svg = plan_svg(explained(planned, mesh={name: 8}, step=name))
    svg.encode()
    assert shown in [line.text for line in lines_of(svg)]
    assert f"device 0 · {shown}" in words(svg)
    assert ElementTree.fromstring(svg).find(f"{NAMESPACE}title").text.startswith(shown)


def test_screen_readers_are_told():
    root = ElementTree.fromstring(plan_svg(explained(transfer("gather"))))
    assert root.get("role") == "img"
    assert [child.tag for child in root[:2]] == [f"{NAMESPACE}title", f"{NAMESPACE}desc"]
    assert root[1].text == (
        "params, version 3 · 8.0 MB · for state: 8.0 MB host ↔ device, 56.0 MB device ↔ device; "
        "gather: asked for. 8.0 × less over the host's link: 8.0 MB planned, 64.0 MB naive."
    )


def test_text_stands_out_from_what_is_behind_it():
    style = ElementTree.fromstring(plan_svg(explained())).find(f"{NAMESPACE}style").text
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    for scheme in (light, dark):
        fills = dict(re.findall(r"\.stepcache-plan \.(\w+) { fill: (#\w{6})", scheme))
        on_paper = itertools.product(("ink", "quiet", "host", "device"), ("paper",))
        on_others = itertools.product(("ink", "quiet"), ("strip",))
        in_boxes = itertools.product(("ink",), ("place", "value"))
        for text, behind in itertools.chain(on_paper, on_others, in_boxes):
            assert contrast(fills[text], fills[behind]) >= 4.5, (text, behind)


def contrast(one: str, other: str) -> float:
    """As the Web Content Accessibility Guidelines define it."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def luminance(color: str) -> float:
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(part * of for part, of in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


# ---- geometry ----------------------------------------------------------------------------------

NAMES = st.one_of(
    st.sampled_from(["params", "m" * 300, "重み" * 80, "a name of many words " * 30, "<a&b>", ""]),
    st.text(max_size=60),
)
SIZES = st.one_of(st.integers(0, 10**4), st.integers(0, 10**16))


@st.composite
def transfers(draw, devices):
    return transfer(
        draw(st.sampled_from(ROUTES)),
        devices,
        draw(SIZES),
        draw(NAMES),
        tuple(draw(st.lists(NAMES, max_size=5))),
        version=draw(st.integers(0, 10**9)),
        why=draw(NAMES),
        error_bound=draw(st.sampled_from(["", "off by at most 2⁻⁸ of each value"])),
    )


@st.composite
def random_plans(draw):
    devices = draw(st.sampled_from([1, 2, 3, 8, 9, 64, 4096]))
    mesh = draw(st.sampled_from([None, {"data": devices}, {"x" * 200: devices, "model": 1}]))
    planned = draw(st.lists(transfers(devices), max_size=6))
    return explained(*planned, mesh=mesh, step=draw(NAMES))


@given(random_plans())
def test_no_text_overlaps_or_is_clipped(explanation):
    svg = plan_svg(explanation)
    root = ElementTree.fromstring(svg)
    width, height = float(root.get("width")), float(root.get("height"))
    lines = lines_of(svg)
    for line in lines:
        assert line.left >= 0 and line.right <= width, line
        assert line.top >= 0 and line.bottom <= height, line
        panel_end = width - 24 if line.left > MIDDLE else MIDDLE
        crosses = line.left < MIDDLE - 14 < line.right
        assert crosses or line.right <= panel_end, line
    for one, other in itertools.combinations(lines, 2):
        apart = (
            one.right <= other.left
            or other.right <= one.left
            or one.bottom <= other.top
            or other.bottom <= one.top
        )
        assert apart, (one, other)
    for arrow, line in itertools.product(arrows_of(svg), lines):
        (x, y), (end_x, end_y) = arrow.points[0], arrow.points[-1]
        for step in range(21):
            at = x + (end_x - x) * step / 20, y + (end_y - y) * step / 20
            inside = line.left < at[0] < line.right and line.top < at[1] < line.bottom
            assert not inside, (arrow, line)


@pytest.mark.slow
@given(st.text(), st.floats(40, 500), st.booleans())
def test_wrapped_lines_fit_and_keep_every_letter(text, width, bold):
    lines = wrapped(text, width, 12, bold, most=10**6)
    assert all(text_width(line, 12, bold) <= width for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert len(wrapped(text, width, 12, bold, most=2)) <= 2
    (line,) = wrapped(text, width, 12, bold, most=1)
    assert text_width(line, 12, bold) <= width


@pytest.mark.parametrize("text", ["", "plain", "\x1b[0m", "a\u0085b", "\ufffe", "\u2028"])
def test_printable_text_is_xml(text):
    ElementTree.fromstring(f"<a>{printable(text)}</a>")


def test_lists_read_as_sentences():
    assert [listed("abc"[:n]) for n in range(4)] == ["", "a", "a and b", "a, b and c"]


@pytest.mark.slow
def test_what_draws_is_loaded_by_who_draws():
    code = (
        "import sys, stepcache; assert 'stepcache.report.picture' not in sys.modules; "
        "stepcache.report.plan_svg(stepcache.step(len).explain([])); "
        "assert 'stepcache.report.picture' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# ---- pages -------------------------------------------------------------------------------------


class Attributes(HTMLParser):
    """Every tag, and what its attributes and texts are."""

    def __init__(self):
        super().__init__()
        self.tags, self.names, self.values = [], set(), set()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.names |= {name for name, _ in attrs}
        self.values |= {value for _, value in attrs if value}


def test_a_page_needs_nothing_else(tmp_path):
    file = tmp_path / "plan.html"
    explanation = explained(transfer("fanout", variable="<script src='x'>"))
    explanation.save_html(file)
    text = file.read_text(encoding="utf-8")
    page = Attributes()
    page.feed(text)
    assert page.tags.count("svg") == 1 and not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not {"src", "href", "xlink:href", "srcset"} & page.names
    assert re.findall(r"https?:[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert "url(" not in text and "@import" not in text
    assert "&lt;script src=&#x27;x&#x27;&gt; version 3: host → devices by fanout" in text
    assert plan_svg(explanation) in text
    assert list(tmp_path.iterdir()) == [file]


def test_a_page_takes_the_place_of_another_when_it_is_whole(tmp_path, monkeypatch):
    file = tmp_path / "plan.html"
    file.write_text("old")

    def fails(*_):
        raise RuntimeError

    with monkeypatch.context() as patched:
        patched.setattr(picture, "draw", fails)
        with pytest.raises(RuntimeError):
            explained().save_html(str(file))
    assert file.read_text() == "old"
    explained().save_html(str(file))
    assert file.read_text().startswith("<!doctype html>")
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(FileNotFoundError):
        explained().save_html(tmp_path / "missing" / "plan.html")
