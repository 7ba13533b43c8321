"""bench/recall.py: its baseline, what it makes of data that lose nothing, and of data whose loss is known."""

import json
import math
import secrets
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

import stepgraph

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import recall  # noqa: E402

FORMATS = ["fp8", "fp8_mx", "mxfp4", "mxfp4_rowgroup"]


@pytest.fixture
def random():
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def number(bits):
    return struct.unpack("<f", struct.pack("<I", int(bits) << 16))[0]


def rounded(x):
    """To FP32, then to BF16's eight significant bits; Python rounds to even too."""
    fraction, exponent = math.frexp(struct.unpack("<f", struct.pack("<f", x))[0])
    return math.ldexp(round(fraction * 256), exponent - 8)


def test_rounds_to_bfloat16(random):
    x = np.concatenate([random.standard_normal(1000), [0.0, 1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 255.5]])
    assert recall.value(recall.bf16(x)).tolist() == [rounded(each) for each in x]


def naive_score(draw, row, position):
    key = [number(bits) for bits in draw.keys[position]]
    mean = sum(key) / 128
    deviation = math.sqrt(sum((x - mean) ** 2 for x in key) / 128 + 1e-5)
    key = [rounded((x - mean) / deviation) for x in key]
    score = 0.0
    for query, weight in zip(draw.queries[row], draw.weights[row]):
        dot = sum(number(q) * k for q, k in zip(query, key))
        score += number(weight) * max(0.0, dot)
    return score


@pytest.mark.parametrize("data", recall.DATA)
def test_the_baseline_is_that_of_plain_loops(data, random):
    draw = recall.DATA[data](random, 20, 2, 16)
    scores = [[naive_score(draw, row, position) for position in range(20)] for row in range(2)]
    found = recall.baseline_scores(draw)
    assert np.abs(found - scores).max() <= 1e-12 * np.abs(scores).max()
    expected = [sorted(range(20), key=lambda position: (-of[position], position))[:7] for of in found]
    assert recall.best(found, 7).tolist() == expected


def lossless(random, context, rows):
    """Every format holds these, and FP32 the sums: keys of +-1 with mean 0, which LayerNorm leaves, queries of E2M1's numbers,
    head weights of few bits, of 32 heads, whose factor is a power of two. Repeated keys score the same, so that ties are cut."""
    keys = np.tile([1.0, -1.0], (context, 64))
    keys = random.permuted(keys, axis=1)[random.integers(context // 2, size=context)]
    queries = random.choice([0, 0.5, -0.5, 1, -1, 1.5, 2, -2, 3, -4, 6], (rows, 32, 128))
    return recall.Draw(*map(recall.bf16, (keys, queries, random.integers(-8, 9, (rows, 32)) / 8)))


def test_what_every_format_holds_is_selected_whole(random):
    draw = lossless(random, 1500, 4)  # more than are inserted at once, and the last page not full
    for name, k, *shares in recall.measure(draw, FORMATS, [1, 100, 750]):
        assert (np.array(shares) == 1).all(), (name, k)


def test_what_is_not_selected_is_missed(random):
    draw = lossless(random, 300, 2)
    other = recall.Draw(draw.keys, -draw.queries, draw.weights)
    ranked = recall.best(recall.baseline_scores(draw), 30)
    cache = recall.inserted(draw.keys, stepgraph.CacheFormat.fp8)
    chosen = recall.selected(other, cache, stepgraph.CacheFormat.fp8, 30)
    shares = recall.recall(chosen, ranked)
    assert shares.tolist() == [len(set(a) & set(b)) / 30 for a, b in zip(chosen.tolist(), ranked.tolist())]
    assert shares.max() < 0.5


def test_fp8_loses_what_rounding_predicts(random):
    # A position changes sides where the error of its score exceeds its distance from the threshold. E4M3 has three mantissa
    # bits, so each operand is off by 2.65 % (root mean square, logarithmically uniform), a product by 3.75 %, and a score by
    # s = 0.045 of the scores' own deviation: relu keeps 1/2 of the errors' variance, 1/2 - 1/(2 pi) of the products'. Of normal
    # scores, a share p selected at the threshold z, phi(z) s / sqrt(2 pi) / p are lost: 3.0 % for one in eight.
    draws = [recall.normal(random, 4096, 4, 32) for _ in range(4)]
    measured = [list(recall.measure(draw, ["fp8", *FORMATS[2:]], [512])) for draw in draws]
    fp8, mxfp4, rowgroup = np.array([[shares.mean() for _, _, shares, _ in draw] for draw in measured]).mean(axis=0)
    assert 0.955 < fp8 < 0.985  # some 245 of 8192 are lost: either bound is seven deviations off
    assert mxfp4 < fp8 - 0.05 and mxfp4 > 0.8
    assert rowgroup == mxfp4


def run(capsys, *options):
    assert recall.main(["--contexts", "256", "1000", "--top-k", "16", "32", "--draws", "1", *options]) == 0
    return capsys.readouterr().out


def test_prints_an_aligned_table(capsys):
    printed = run(capsys, "--seed", "3")
    head, _, *lines = printed.splitlines()
    assert head.startswith("seed 3, 32 heads, 4 rows a cell")
    assert [len(line) for line in lines] == [len(lines[0])] * (2 + 3 * 2)
    assert all(line.count("|") == 3 + 3 * 2 for line in lines)
    assert run(capsys, "--seed", "3") == printed
    assert run(capsys, "--seed", "4") != printed


def test_prints_json_with_the_seed_drawn(capsys):
    printed = run(capsys, "--json")
    result = json.loads(printed)
    assert run(capsys, "--json", "--seed", str(result["seed"])) == printed
    assert len(result["rows"]) == 3 * 2 * 3 * 2
    draw = recall.normal(np.random.default_rng(result["seed"]), 256, 4, 32)  # the first that is drawn
    for name, k, shares, best_quarter in recall.measure(draw, FORMATS[:3], [16, 32]):
        assert {
            "keys": "normal", "context": 256, "format": name, "k": k, "rows": 4,
            "recall": shares.mean(), "lowest": shares.min(), "best_quarter": best_quarter.mean(),
        } in result["rows"]


@pytest.mark.parametrize(
    "options", [["--top-k", "0"], ["--top-k", "256"], ["--draws", "0"], ["--seed", "-1"], ["--formats", "fp4"]]
)
def test_refuses_what_selects_nothing_or_everything(options, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(capsys, *options)
    assert options[0] in capsys.readouterr().err
