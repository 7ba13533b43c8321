"""The tables of the README hold what bench/results does: a figure that is not one of a published run cannot stay."""

import json
import re
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LENGTHS = (4096, 16384, 32768, 65536, 131072)


def result(name):
    return json.loads((ROOT / f"bench/results/h200-{name}.json").read_text(encoding="utf-8"))


def table(behind):
    """The cells of the first table behind a text, row by row, each with its head."""
    lines = README[README.index(behind) :].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return {row[0]: row[1:] for row in rows}


def one(cells, /, **wanted):
    [found] = [row for row in cells if all(row[key] == value for key, value in wanted.items())]
    return found


def us(row):
    return f"{row['us']:.1f}"


def check(behind, text_of, heads=(1, 8, 32, 64, 128), columns=LENGTHS):
    assert table(behind) == {str(head): [text_of(head, column) for column in columns] for head in heads}


def test_step():
    usual = {"format": "fp8", "rows_per_request": 1, "layers": 24, "edges": "programmatic", "captured_context": 131072}
    check("**A layer**", lambda n, length: us(one(result("step")["rows"], requests=n, context=length, **usual)))


@pytest.mark.parametrize(("format", "behind"), [("fp8", "FP8 pages (132 bytes a key):"), ("mxfp4", "MXFP4 pages (68 bytes a key):")])
def test_score(format, behind):
    scored = result("score")
    usual = {"format": format, "rows_per_request": 1, "heads": 32, "cold": True, "edges": "programmatic"}

    def text_of(n, length):
        row = one(scored["rows"], requests=n, context=length, captured_context=length, **usual)
        return f"{us(row)} ({row['key_bytes'] / row['us'] / scored['ceiling_tb_s'] / 1e6:.2f})"

    check(behind, text_of)


def test_select():
    usual = {"k": 2048, "distribution": "normal", "cold": False, "kernel": "select_sm90", "edges": "programmatic"}
    rows = result("select")["rows"]
    check("**Select**", lambda n, length: us(one(rows, rows=n, length=length, captured_length=length, **usual)))


def test_project():
    lines = {
        "alone": partial(one, against="stepgraph", added=False),
        "added to a chain": partial(one, against="stepgraph", added=True),
        "cuBLASLt's two, alone": partial(one, against="cublaslt", added=False),
    }
    rows = [row for row in result("project")["rows"] if row["shape"] == "k3"]
    check("**Project**", lambda line, n: us(lines[line](rows, rows=n)), heads=lines, columns=(1, 16, 32, 64, 128, 256))


@pytest.mark.parametrize("name", ["step", "score", "select", "project"])
def test_all_was_checked(name):
    published = result(name)
    assert re.fullmatch("[0-9a-f]{40}", published["revision"])
    assert all(row["checked"] and row["mismatches"] == 0 for row in published["rows"])
