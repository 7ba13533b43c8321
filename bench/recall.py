#!/usr/bin/env python3
"""Says how many of the K best positions by BF16 scores are still selected from quantised queries and keys.

    recall.py [--seed 7] [--json] [--formats fp8 fp8_mx mxfp4] [--contexts 4096 16384 65536] [--top-k 512 2048]

Quantised and selected by the library itself, on the CPU: keys are inserted and queries scored as a step does. The baseline's
scores are computed in FP64 from what the library is handed (queries and head weights in BF16) and from the keys as they are
before they are quantised: normalised and rounded to BF16. Recall is the share of the baseline's K positions that are selected.

Needs numpy and the package stepgraph; no GPU.
"""
import argparse
import json
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import stepgraph

COLUMNS = 128
QUERIES = 4  # rows that share the keys of a draw
CLUSTERS = 64
OUTLIER_COLUMNS, OUTLIER_FACTOR = 4, 10
INSERTED_AT_ONCE = 1024

Bits = NDArray[np.uint16]
Floats = NDArray[np.float64]


def bf16(x: Floats) -> Bits:
    """The bits of finite numbers in BF16, rounded to nearest even."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def value(bits: Bits) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


# ---- data ------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Draw:
    """Keys before their LayerNorm [context, 128]; queries [rows, heads, 128] and head weights [rows, heads] of rows that see
    all of the keys."""

    keys: Bits
    queries: Bits
    weights: Bits


def normal(random: np.random.Generator, context: int, rows: int, heads: int) -> Draw:
    return Draw(
        bf16(random.standard_normal((context, COLUMNS))),
        bf16(random.standard_normal((rows, heads, COLUMNS))),
        bf16(random.standard_normal((rows, heads))),
    )


def clustered(random: np.random.Generator, context: int, rows: int, heads: int) -> Draw:
    """Each key and each head's query is one of the centres that they share, and as much noise."""
    centres = random.standard_normal((CLUSTERS, COLUMNS))
    noise = normal(random, context, rows, heads)
    return Draw(
        bf16(centres[random.integers(CLUSTERS, size=context)] + value(noise.keys)),
        bf16(centres[random.integers(CLUSTERS, size=(rows, heads))] + value(noise.queries)),
        noise.weights,
    )


def heavy_tailed(random: np.random.Generator, context: int, rows: int, heads: int) -> Draw:
    """Student's t of three degrees of freedom, and a few columns of the keys larger than the others, as real models have."""
    keys = random.standard_t(3, (context, COLUMNS))
    keys[:, random.choice(COLUMNS, OUTLIER_COLUMNS, replace=False)] *= OUTLIER_FACTOR
    return Draw(
        bf16(keys), bf16(random.standard_t(3, (rows, heads, COLUMNS))), bf16(random.standard_normal((rows, heads)))
    )


DATA: dict[str, Callable[[np.random.Generator, int, int, int], Draw]] = {
    "normal": normal,
    "clustered": clustered,
    "heavy-tailed": heavy_tailed,
}


# ---- the baseline ----------------------------------------------------------------------------------------------------------
def normalised(keys: Bits, eps: float = 1e-5) -> Floats:
    """LayerNorm with weight 1 and bias 0, rounded to BF16 as keys are before they are quantised."""
    x = value(keys)
    centred = x - x.mean(axis=1, keepdims=True)
    return value(bf16(centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + eps)))


def baseline_scores(draw: Draw) -> Floats:
    """[rows, context]; without the factor that all heads share."""
    keys = normalised(draw.keys).T
    return np.stack([w @ np.maximum(q @ keys, 0) for q, w in zip(value(draw.queries), value(draw.weights))])


def best(scores: Floats, k: int) -> NDArray[np.int64]:
    """Of each row the K best positions, the best one first, the lower one first where scores are equal."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


# ---- the library -----------------------------------------------------------------------------------------------------------
def inserted(keys: Bits, cache_format: stepgraph.CacheFormat) -> NDArray[np.uint8]:
    """A cache that holds the keys in order. Each is the only one of a request, which leaves nothing to score, and its slot
    says where it goes."""
    rows = min(len(keys), INSERTED_AT_ONCE)
    pages = -(-len(keys) // 64)
    pipeline = stepgraph.Pipeline(
        stepgraph.Geometry(heads=16, top_k=1, max_rows=rows, max_requests=rows, max_model_len=64, block_table_columns=1,
                           cache_format=cache_format, pages=pages),
        device="cpu",
    )
    cache = np.zeros((pages, pipeline.geometry.page_stride_bytes), np.uint8)
    once, slots = np.ones(rows, np.int32), np.empty(rows, np.int64)
    projected = np.zeros((rows, COLUMNS + 16), np.uint16)
    pipeline.bind(
        stepgraph.StepBuffers(seq_lens=once, query_lens=once, block_table=np.zeros((rows, 1), np.int32), slots=slots),
        [layer_buffers(np.zeros((rows, 16 * COLUMNS), np.uint16), projected, cache, np.empty((rows, 1), np.int32))],
    )
    for begin in range(0, len(keys), rows):
        some = keys[begin : begin + rows]
        projected[: len(some), :COLUMNS] = some
        slots[:] = -1
        slots[: len(some)] = np.arange(begin, begin + len(some))
        step(pipeline, rows)
    return cache


def selected(draw: Draw, cache: NDArray[np.uint8], cache_format: stepgraph.CacheFormat, k: int) -> NDArray[np.int32]:
    """Of each row the K positions that the library selects. All rows read the same pages and insert nothing."""
    rows, heads, _ = draw.queries.shape
    pipeline = stepgraph.Pipeline(
        stepgraph.Geometry(heads=heads, top_k=k, max_rows=rows, max_requests=rows, max_model_len=64 * len(cache),
                           block_table_columns=len(cache), cache_format=cache_format, pages=len(cache)),
        device="cpu",
    )
    indices = np.empty((rows, k), np.int32)
    projected = np.concatenate([np.zeros((rows, COLUMNS), np.uint16), draw.weights], axis=1)
    pipeline.bind(
        stepgraph.StepBuffers(
            seq_lens=np.full(rows, len(draw.keys), np.int32),
            query_lens=np.ones(rows, np.int32),
            block_table=np.tile(np.arange(len(cache), dtype=np.int32), (rows, 1)),
            slots=np.full(rows, -1, np.int64),
        ),
        [layer_buffers(draw.queries.reshape(rows, -1), projected, cache, indices)],
    )
    step(pipeline, rows)
    return indices


def layer_buffers(
    iq: Bits, projected: Bits, cache: NDArray[np.uint8], indices: NDArray[np.int32]
) -> stepgraph.LayerBuffers:
    weight, bias = np.ones(COLUMNS, np.float32), np.zeros(COLUMNS, np.float32)
    return stepgraph.LayerBuffers(
        iq=iq, projected=projected, k_norm_weight=weight, k_norm_bias=bias, cache=cache, indices=indices
    )


def step(pipeline: stepgraph.Pipeline, rows: int) -> None:
    pipeline.enqueue_layout(rows)
    pipeline.enqueue_layer(0, rows)
    if any(pipeline.status()):
        raise RuntimeError(f"the step skipped data: {pipeline.status()}")


# ---- recall ----------------------------------------------------------------------------------------------------------------
def recall(chosen: NDArray[np.int32], expected: NDArray[np.int64]) -> Floats:
    """Of each row the share of the expected positions that are chosen."""
    return np.array([np.isin(row, of).mean() for row, of in zip(expected, chosen)])


def measure(draw: Draw, formats: list[str], top_k: list[int]) -> Iterator[tuple[str, int, Floats, Floats]]:
    """Format, K, and of each row: recall, and the share of the baseline's best K/4 that is among the K selected."""
    ranked = best(baseline_scores(draw), max(top_k))
    for name in formats:
        cache_format = stepgraph.CacheFormat[name]
        cache = inserted(draw.keys, cache_format)
        for k in top_k:
            chosen = selected(draw, cache, cache_format, k)
            yield name, k, recall(chosen, ranked[:, :k]), recall(chosen, ranked[:, : max(1, k // 4)])


def cells(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    random = np.random.default_rng(arguments.seed)
    found = []
    for keys, draw in DATA.items():
        for context in arguments.contexts:
            measured: dict[tuple[str, int], list[tuple[Floats, Floats]]] = {}
            for _ in range(arguments.draws):
                drawn = draw(random, context, QUERIES, arguments.heads)
                for name, k, all_of_k, best_quarter in measure(drawn, arguments.formats, arguments.top_k):
                    measured.setdefault((name, k), []).append((all_of_k, best_quarter))
            for (name, k), shares in measured.items():
                all_of_k, best_quarter = np.concatenate(shares, axis=1)
                found.append({"keys": keys, "context": context, "format": name, "k": k, "rows": len(all_of_k),
                              "recall": all_of_k.mean(), "lowest": all_of_k.min(), "best_quarter": best_quarter.mean()})
    return found


def table(found: list[dict[str, Any]]) -> str:
    """Aligned Markdown: a line for each kind of keys and context, and of each format and K the mean, in brackets the lowest."""
    lines: dict[tuple[str, int], dict[str, str]] = {}
    for cell in found:
        context = cell["context"]
        line = lines.setdefault((cell["keys"], context), {
            "keys": cell["keys"], "context": str(context) if context % 1024 else f"{context // 1024} K"})
        line[f"{cell['format']}, K {cell['k']}"] = f"{cell['recall']:.3f} ({cell['lowest']:.3f})"
    widths = {name: max(len(name), *(len(line[name]) for line in lines.values())) for name in next(iter(lines.values()))}
    rule = {name: "-" * width for name, width in widths.items()}
    whole = [dict(zip(widths, widths)), rule, *lines.values()]
    return "\n".join("| " + " | ".join(line[name].ljust(width) for name, width in widths.items()) + " |" for line in whole)


def arguments_of(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="of the data (default: drawn, and printed)")
    parser.add_argument("--json", action="store_true", help="print JSON, which also says how much of the best K/4 is selected")
    parser.add_argument("--formats", nargs="+", default=["fp8", "fp8_mx", "mxfp4"],
                        choices=["fp8", "fp8_mx", "mxfp4", "mxfp4_rowgroup"])
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 16384, 65536], help="keys that a row sees")
    parser.add_argument("--top-k", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--heads", type=int, default=32, choices=[16, 32, 64])
    parser.add_argument("--draws", type=int, default=8, help=f"of keys in each cell, {QUERIES} rows each (default 8)")
    arguments = parser.parse_args(argv)
    if arguments.seed is None:
        arguments.seed = secrets.randbits(32)
    if arguments.seed < 0:
        parser.error(f"--seed is {arguments.seed}, must not be negative")
    if arguments.draws < 1:
        parser.error(f"--draws is {arguments.draws}, must be at least 1")
    if not 1 <= min(arguments.top_k) <= max(arguments.top_k) < min(arguments.contexts):
        parser.error("--top-k must be at least 1 and below every one of --contexts, where there is something to select")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = arguments_of(argv)
    found = cells(arguments)
    if arguments.json:
        print(json.dumps({"seed": arguments.seed, "heads": arguments.heads, "rows": found}, indent=1))
    else:
        print(f"seed {arguments.seed}, {arguments.heads} heads, {arguments.draws * QUERIES} rows a cell: "
              "mean recall, in brackets the lowest of a row\n")
        print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
