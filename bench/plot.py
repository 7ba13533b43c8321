#!/usr/bin/env python3
"""Draws a result of score_bench: time against context, beside the time that reading the keys takes at least.

    plot.py h200-score.json h200-score.svg

Needs matplotlib.
"""
import json
import sys

import matplotlib

matplotlib.use("svg" if sys.argv[2].endswith(".svg") else "agg")
import matplotlib.pyplot as plt

plt.rcParams["svg.fonttype"] = "none"  # text as text
plt.rcParams["svg.hashsalt"] = "stepgraph"  # the same file from the same result


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        result = json.load(file)
    cells = [
        row
        for row in result["rows"]
        if row["rows_per_request"] == 1
        and row["heads"] == 32
        and row["cold"]
        and row["edges"] == "programmatic"
        and row["captured_context"] == row["context"]
    ]
    figure, (time, share) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for requests in sorted({row["requests"] for row in cells}):
        rows = sorted((row for row in cells if row["requests"] == requests), key=lambda row: row["context"])
        context = [row["context"] / 1024 for row in rows]
        floor = [row["key_bytes"] / result["ceiling_tb_s"] / 1e6 for row in rows]
        (line,) = time.plot(context, [row["us"] for row in rows], marker="o", label=f"{requests} request{'s' if requests > 1 else ''}")
        time.plot(context, floor, linestyle=":", color=line.get_color())
        share.plot(context, [f / row["us"] for f, row in zip(floor, rows)], marker="o", color=line.get_color())
    for axes in (time, share):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({row["context"] / 1024 for row in cells}), labels=sorted({row["context"] // 1024 for row in cells}))
        axes.set_xlabel("context, 1024 tokens")
        axes.grid(alpha=0.3)
    time.set_yscale("log")
    time.set_ylabel("µs; dotted: reading the keys at the ceiling")
    time.legend(loc="lower right")
    share.set_ylabel("share of the read ceiling")
    share.set_ylim(0, 1)
    figure.suptitle(
        f"score, FP8, 32 heads, one row a request, cold: {result['gpu']}, ceiling {result['ceiling_tb_s']:.2f} TB/s"
    )
    figure.savefig(sys.argv[2], metadata={"Date": None} if sys.argv[2].endswith(".svg") else None)


if __name__ == "__main__":
    main()
