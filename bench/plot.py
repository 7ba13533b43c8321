#!/usr/bin/env python3
"""Draws a result of score_bench or of step_bench.

    plot.py h200-score.json h200-score.svg
    plot.py h200-step.json h200-step.svg

Of both: time against context, beside the time that reading the bytes takes at least. Of score_bench also the share of the read
ceiling; of step_bench what the stages add to a layer one behind the other, and what programmatic edges save.

Needs matplotlib.
"""
import json
import sys

import matplotlib

matplotlib.use("svg" if sys.argv[2].endswith(".svg") else "agg")
import matplotlib.pyplot as plt

plt.rcParams["svg.fonttype"] = "none"  # text as text
plt.rcParams["svg.hashsalt"] = "stepgraph"  # the same file from the same result


def label(row: dict) -> str:
    return f"{row['requests']} × {row['context'] // 1024} K"


def scale_context(axes, cells: list) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({row["context"] / 1024 for row in cells}), labels=sorted({row["context"] // 1024 for row in cells}))
    axes.set_xlabel("context, 1024 tokens")
    axes.grid(alpha=0.3)


def draw_times(axes, cells: list, floor_us, legend: str, share=None) -> None:
    """Time against context, a line for each number of requests, and the floor dotted; `share`: axes for floor / time."""
    for requests in sorted({row["requests"] for row in cells}):
        rows = sorted((row for row in cells if row["requests"] == requests), key=lambda row: row["context"])
        context = [row["context"] / 1024 for row in rows]
        (line,) = axes.plot(context, [row["us"] for row in rows], marker="o", label=f"{requests} request{'s' if requests > 1 else ''}")
        axes.plot(context, [floor_us(row) for row in rows], linestyle=":", color=line.get_color())
        if share is not None:
            share.plot(context, [floor_us(row) / row["us"] for row in rows], marker="o", color=line.get_color())
    scale_context(axes, cells)
    axes.set_yscale("log")
    axes.legend(loc=legend)


def is_plain(row: dict) -> bool:
    """One row a request, programmatic edges, captured for what it runs at."""
    return row["rows_per_request"] == 1 and row["edges"] == "programmatic" and row["captured_context"] == row["context"]


def draw_score(result: dict):
    cells = [row for row in result["rows"] if is_plain(row) and row["heads"] == 32 and row["cold"]]
    figure, (time, share) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    draw_times(time, cells, lambda row: row["key_bytes"] / result["ceiling_tb_s"] / 1e6, "lower right", share)
    time.set_ylabel("µs; dotted: reading the keys at the ceiling")
    scale_context(share, cells)
    share.set_ylabel("share of the read ceiling")
    share.set_ylim(0, 1)
    figure.suptitle(
        f"score, FP8, 32 heads, one row a request, cold: {result['gpu']}, ceiling {result['ceiling_tb_s']:.2f} TB/s"
    )
    return figure


def draw_waterfall(axes, row: dict) -> None:
    """Each stage begins where those before it end; what they share or wait for is what is left of the layer."""
    stages = dict(row["stage_us"])
    stages["the rest"] = row["us"] - sum(stages.values())
    begin = 0
    for at, (stage, us) in enumerate(stages.items()):
        axes.barh(at, us, left=begin, color="0.7" if stage == "the rest" else f"C{at}")
        axes.text(max(begin, begin + us), at, f" {us:.1f}", va="center")
        begin += us
    axes.axvline(row["us"], linestyle=":", color="0.3")
    axes.set_yticks(range(len(stages)), labels=stages)
    axes.invert_yaxis()
    axes.set_xlim(right=1.15 * row["us"])
    axes.set_xlabel("µs")
    axes.set_title(f"a layer at {label(row)}, stage by stage")


def draw_edges(axes, pairs: list) -> None:
    """Layers with full edges beside those with programmatic ones."""
    for at, (programmatic, full) in enumerate(pairs):
        axes.bar(at - 0.2, full["us"], 0.4, color="C1", label="full" if at == 0 else None)
        axes.bar(at + 0.2, programmatic["us"], 0.4, color="C0", label="programmatic" if at == 0 else None)
        axes.text(at, full["us"], f"{full['us'] - programmatic['us']:+.1f}", ha="center", va="bottom")
    axes.set_xticks(range(len(pairs)), labels=[label(full) for _, full in pairs])
    axes.set_ylabel("µs a layer; above: what full edges cost")
    axes.set_title("edges")
    axes.legend()


def draw_step(result: dict):
    of_format = [row for row in result["rows"] if row["format"] == "fp8" and row["layers"] == 24]
    cells = [row for row in of_format if is_plain(row)]
    same = {(row["requests"], row["context"]): row for row in cells}
    pairs = [(same[at], row) for row in of_format if row["edges"] == "full" and (at := (row["requests"], row["context"])) in same]
    figure, (time, stages, edges) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    draw_times(time, cells, lambda row: row["floor_bytes"] / result["ceiling_tb_s"] / 1e6, "upper left")
    time.set_ylabel("µs a layer; dotted: its bytes at the ceiling")
    draw_waterfall(stages, same.get((32, 4096), cells[0]))
    draw_edges(edges, sorted(pairs, key=lambda pair: pair[1]["us"]))
    figure.suptitle(
        f"projections to indices, FP8, K3 shape, one row a request, {'cold' if all(row['cold'] for row in cells) else 'cold or hot'}: "
        f"{result['gpu']}, ceiling {result['ceiling_tb_s']:.2f} TB/s"
    )
    return figure


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        result = json.load(file)
    figure = draw_step(result) if "stage_us" in result["rows"][0] else draw_score(result)
    figure.savefig(sys.argv[2], metadata={"Date": None} if sys.argv[2].endswith(".svg") else None)


if __name__ == "__main__":
    main()
