"""What the README shows is what happens, and the tables of `docs/costs.md` are of results."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COSTS = (ROOT / "docs" / "costs.md").read_text(encoding="utf-8")


def found(pattern: str, text: str) -> tuple:
    match = re.search(pattern, text, re.S)
    assert match, f"nothing matches {pattern}"
    return match.groups()


def test_the_example_prints_what_the_readme_says():
    code, printed = re.search(
        r"```python\n(.*?)```\n\nprints\n\n```\n(.*?)```", README, re.S
    ).groups()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "README.md", "exec"), {})
    assert output.getvalue() == printed
    assert len([line for line in code.splitlines() if line.strip()]) <= 16


def test_the_language_model_explains_what_the_readme_says(tmp_path):
    """It is ended as soon as it has: training takes a while."""
    environment = {"JAX_PLATFORMS": "cpu", "STEPCACHE_DIR": str(tmp_path / "programs")}
    with subprocess.Popen(
        [sys.executable, "-u", "examples/char_lm.py"],
        cwd=ROOT,
        env={**os.environ, **environment, "COLUMNS": "140"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.endswith(" moved.\n"):
                break
        process.kill()
    assert f"prints before its first step:\n\n```\n{''.join(lines)}```" in README


# Each of these is a dozen fresh processes, and minutes.
ROUNDS = {"restart": 5, "first_steps": 11, "pod_start": 7, "small_steps": 5, "pod_protocol": 5}
ROUNDS |= {"served": 7, "padding": 5, "remote_cache": 2, "remote": 15}


@pytest.mark.parametrize("result", sorted((ROOT / "benchmarks" / "results").glob("*.json")))
def test_results_are_of_real_runs(result):
    record = json.loads(result.read_text())
    assert record["settings"]["rounds"] >= ROUNDS.get(record["benchmark"], 20) and record["rows"]


def test_the_figures_of_pods_are_those_of_two_results():
    lines = COSTS[COSTS.index("| a pod's first step |") :].split("\n\n")[0].splitlines()[2:]
    contenders = {
        "every process compiles, `jax.jit`": "jax.jit, every process compiles",
        "one compiles, by hand": "by hand, one compiles",
        "one compiles, stepcache": "stepcache, one compiles",
        "warm, stepcache": "stepcache, warm",
    }
    results = sorted((ROOT / "benchmarks" / "results").glob("pod_start-*.json"))
    for number, result in enumerate(results):
        measured = {row["contender"]: row for row in json.loads(result.read_text())["rows"]}
        assert len(measured) == len(lines)
        for line in lines:
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            row = measured[contenders[name]]
            seconds, ratio = cells[2 * number : 2 * number + 2]
            assert seconds == f"{row['median_seconds']:.1f}"
            ratios = "{ratio:.2f} × ({ratio_low:.2f} … {ratio_high:.2f})".format(**row)
            assert ratio == ("" if name.endswith("`jax.jit`") else ratios)


def test_the_figures_of_the_protocol_are_those_of_a_result():
    lines = COSTS[COSTS.index("| ranks | a new key") :].split("\n\n")[0].splitlines()[2:]
    (result,) = (ROOT / "benchmarks" / "results").glob("pod_protocol-*.json")
    measured = {(row["case"], row["ranks"]): row for row in json.loads(result.read_text())["rows"]}
    assert len(lines) == len({ranks for _, ranks in measured})
    for line in lines:
        ranks, *cells = (cell.strip().replace(",", "") for cell in line.strip("|").split("|"))
        key, built, barrier, quiet, late, never, lost = (
            measured[case, int(ranks)]
            for case in (
                "stored",
                "built by one",
                "a barrier of JAX's",
                "quiet",
                "late",
                "never comes",
                "lost",
            )
        )
        assert cells == [
            f"{key['mean_calls']:.1f}",
            f"{key['mean_bytes']:.0f}",
            f"{key['service_cpu_seconds'] * 1e3:.0f} ms",
            f"{key['seconds']:.2f} s",
            f"{built['mean_calls']:.1f}",
            f"{barrier['service_cpu_seconds'] * 1e3:.1f} ms",
            f"{quiet['mean_calls']:.0f}",
            f"{late['mean_calls']:.1f}",
            f"{never['seconds'] - 7:.1f} s",
            f"{lost['seconds'] - 3:.1f} s",
        ]


def test_the_figures_of_small_steps_are_those_of_the_results():
    """Of each Python: seconds, the ratio to them, and by how much later the process ends."""
    lines = (
        COSTS[COSTS.index("| many steps, or a large one |") :].split("\n\n")[0].splitlines()[2:]
    )
    results = sorted((ROOT / "benchmarks" / "results").glob("small_steps-*.json"))
    for number, result in enumerate(results):
        measured = {
            (row["case"], row["contender"]): row for row in json.loads(result.read_text())["rows"]
        }
        assert len(lines) == len({case for case, _ in measured}) // 2
        for line in lines:
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            warm = name.endswith("warm")
            plain = "jax.jit, persistent cache" if warm else "jax.jit, nothing stored"
            ours = "stepcache, third start" if warm else "stepcache, nothing stored"
            ends = [measured[f"end, {name}", each]["median_seconds"] for each in (plain, ours)]
            assert cells[3 * number : 3 * number + 3] == [
                f"{measured[name, plain]['median_seconds']:.2f}",
                "{ratio:.2f} × ({ratio_low:.2f} … {ratio_high:.2f})".format(**measured[name, ours]),
                f"{ends[1] - ends[0]:+.1f}",
            ]


def test_the_figures_of_a_shared_cache_are_those_of_a_result():
    lines = COSTS[COSTS.index("| a start with an empty directory |") :].split("\n\n")[0]
    contenders = {
        "nothing is stored, no shared cache": "nothing stored",
        "the directory of an earlier start": "directory, warm",
        "shared cache": "shared, 0 ms",
        "shared cache, answers 20 ms later": "shared, 20 ms",
        "shared cache, answers 50 ms later": "shared, 50 ms",
        "the same, and it holds nothing": "shared, empty, 50 ms",
        "shared cache that refuses connections": "shared, refuses",
        "shared cache that never answers": "shared, hangs",
    }
    (result,) = (ROOT / "benchmarks" / "results").glob("remote_cache-*.json")
    record = json.loads(result.read_text())
    measured = {(row["case"], row["contender"]): row for row in record["rows"]}
    cases = list(dict.fromkeys(case for case, _ in measured))
    assert len(lines.splitlines()[2:]) * len(cases) == len(measured)
    for line in lines.splitlines()[2:]:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        expected = []
        for case in cases:
            row = measured[case, contenders[name]]
            waits = record["figures"][f"{case}: {contenders[name]}"]["remote_seconds"]["median"]
            ratio = "{ratio:.2f} × ({ratio_low:.2f} … {ratio_high:.2f})".format(**row)
            cold = row["contender"] == "nothing stored"
            expected.append(f"{row['median_seconds']:.1f} s" if cold else ratio)
            expected.append(f"{waits:.2f} s" if row["contender"].startswith("shared") else "")
        assert cells == expected


def test_the_figures_of_variables_are_those_of_a_result():
    """Of each case: the time of `jax.jit`, ratios of calls to it, and that of first calls."""
    version = found(r"Python 3\.11\.\d+, jax (\d+(?:\.\d+)+)", COSTS)[0]
    path = ROOT / "benchmarks" / "results" / f"resident-cpu-jax{version}.json"
    measured = {
        (row["case"].removeprefix("null step, "), row["contender"]): row
        for row in json.loads(path.read_text())["rows"]
    }
    contenders = ("resident", "packed", "plain tree")
    lines = COSTS[COSTS.index("| a step that carries |") :].split("\n\n")[0].splitlines()[2:]
    assert len(lines) == len({case for case, _ in measured if not case.startswith("first call, ")})
    for line in lines:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        peer = next(key for key in measured if key[0] == name)
        rows = [
            *(measured.get((name, f"stepcache, {each}")) for each in contenders),
            measured.get((name, "nnx.jit")),
            measured.get((f"first call, {name}", "stepcache, resident")),
        ]
        ratios = [f"{row['ratio']:.2f} ×" if row is not None else "" for row in rows]
        if name.startswith("moments"):
            best = measured[name, "copies in the program"]["ratio"]
            ratios[0] = f"{measured[name, 'stepcache, OnHost']['ratio']:.2f} × ({best:.2f} ×)"
        assert cells == [f"{measured[peer]['median_seconds'] * 1e6:,.1f}", *ratios], line


# Of each table: what its header says, the benchmark, and the contenders of its columns of ratios.
TABLES = [
    ("`equinox.filter_jit`", "dispatch", ["stepcache"], ""),
    (
        "`nnx.jit_partial` | stepcache",
        "modules",
        ["nnx.jit_partial", "stepcache.nnx", "stepcache.nnx, donated", "jax.jit, list"],
        "nnx null step, ",
    ),
    ("JAX's cache, s", "restart", ["stepcache", "stepcache, defined first"], ""),
]


@pytest.mark.parametrize(("header", "benchmark", "contenders", "prefix"), TABLES)
def test_the_figures_are_those_of_a_result(header, benchmark, contenders, prefix):
    """Each ratio in a table of the page stands in the result that the table says it is from."""
    version = found(r"Python 3\.11\.\d+, jax (\d+(?:\.\d+)+)", COSTS)[0]
    path = ROOT / "benchmarks" / "results" / f"{benchmark}-cpu-jax{version}.json"
    measured = {
        (row["case"].removeprefix(prefix), row["contender"]): row
        for row in json.loads(path.read_text())["rows"]
    }
    lines = COSTS[COSTS.index(header) :].split("\n\n")[0].splitlines()[2:]
    assert len(lines) >= 4
    for line in lines:
        name, _, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        case = {
            "24 layers, 1,173 leaves, 1 device": "24 layers, 1 device",
            "6 layers, 309 leaves, 4 devices": "6 layers, 4 devices",
            "48 layers, 2,325 leaves, 4 devices": "48 layers, 4 devices",
        }.get(name, name)
        for contender, cell in zip(contenders, cells, strict=False):
            ratios = [
                measured[case, contender][key] for key in ("ratio", "ratio_low", "ratio_high")
            ]
            shown = re.findall(r"\d+\.\d+", cell)
            assert shown == [f"{x:.{len(y) - 2}f}" for x, y in zip(ratios, shown, strict=True)], (
                cell
            )
