#!/usr/bin/env python3
"""Draws a result of score_bench, of select_bench, of project_bench or of step_bench.

    plot.py h200-score.json h200-score.svg
    plot.py h200-select.json h200-select.svg

Of score_bench and step_bench: time against context, beside the time that reading the bytes takes at least; of score_bench also the
share of the read ceiling; of step_bench what the stages add to a layer one behind the other, and what programmatic edges save. Of
select_bench: time against the length of the rows, and what other logits than normal ones cost. Of project_bench: time against the
rows, beside cuBLASLt and the time that reading the weights takes at least.

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
    """One row a request, programmatic edges."""
    return row["rows_per_request"] == 1 and row["edges"] == "programmatic"


def draw_score(result: dict):
    plain = [
        row
        for row in result["rows"]
        if is_plain(row) and row["heads"] == 32 and row["cold"] and row["captured_context"] == row["context"]
    ]
    formats = [name for name in ("fp8", "mxfp4") if any(row["format"] == name for row in plain)]
    figure, axes = plt.subplots(len(formats), 2, figsize=(11, 4.2 * len(formats)), layout="constrained", squeeze=False)
    for name, (time, share) in zip(formats, axes):
        cells = [row for row in plain if row["format"] == name]
        draw_times(time, cells, lambda row: row["key_bytes"] / result["ceiling_tb_s"] / 1e6, "lower right", share)
        time.set_ylabel(f"{name}, µs; dotted: reading the keys at the ceiling")
        scale_context(share, cells)
        share.set_ylabel("share of the read ceiling")
        share.set_ylim(0, 1)
    figure.suptitle(f"score, 32 heads, one row a request, cold: {result['gpu']}, ceiling {result['ceiling_tb_s']:.2f} TB/s")
    return figure


def draw_select(result: dict):
    cells = [row for row in result["rows"] if not row["cold"] and row["k"] == 2048 and row["edges"] == "programmatic"
             and row["captured_length"] == row["length"] and row["kernel"] == "select_sm90"]
    normal = {(row["rows"], row["length"]): row["us"] for row in cells if row["distribution"] == "normal"}
    figure, (time, others) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for rows in sorted({at[0] for at in normal}):
        lengths = sorted(at[1] for at in normal if at[0] == rows)
        time.plot([length / 1024 for length in lengths], [normal[rows, length] for length in lengths], marker="o",
                  label=f"{rows} row{'s' if rows > 1 else ''}")
    time.set_xscale("log", base=2)
    time.set_xticks(sorted({at[1] / 1024 for at in normal}), labels=sorted({at[1] // 1024 for at in normal}))
    time.set_xlabel("length of a row, 1024 logits")
    time.set_ylabel("µs, normal logits")
    time.set_ylim(bottom=0)
    time.grid(alpha=0.3)
    time.legend(loc="upper left")
    distributions = [name for name in dict.fromkeys(row["distribution"] for row in cells) if name != "normal"]
    for at, name in enumerate(distributions):
        ratios = [row["us"] / normal[row["rows"], row["length"]] for row in cells if row["distribution"] == name]
        others.plot(ratios, [at] * len(ratios), "o", color=f"C{at}", alpha=0.6)
    others.axvline(1, color="0.3", linestyle=":")
    others.set_yticks(range(len(distributions)), labels=distributions)
    others.set_xlabel("time over that of normal logits, one point a cell")
    others.grid(alpha=0.3)
    figure.suptitle(f"select, K 2048, exact, logits in the L2: {result['gpu']}")
    return figure


def draw_project(result: dict):
    cells = [row for row in result["rows"] if row["shape"] == "k3"]
    figure, axes = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    for against, chain, name in (("stepgraph", False, "stepgraph"), ("stepgraph", True, "stepgraph, added to a chain"),
                                 ("cublaslt", False, "cuBLASLt")):
        line = sorted((row for row in cells if row["against"] == against and row["added"] == chain), key=lambda row: row["rows"])
        axes.plot([row["rows"] for row in line], [row["us"] for row in line], marker="o", label=name)
    axes.axhline(cells[0]["weight_bytes"] / result["ceiling_tb_s"] / 1e6, linestyle=":", color="0.3", label="reading the weights")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({row["rows"] for row in cells}), labels=sorted({row["rows"] for row in cells}))
    axes.set_xlabel("rows")
    axes.set_ylabel("µs, both products, cold weights")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    figure.suptitle(f"project, K3 shape: {result['gpu']}")
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
    usual = max(row["context"] for row in of_format)  # captured for what the longest cell needs
    cells = [row for row in of_format if is_plain(row) and row["captured_context"] == usual]
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


# By a key that only its rows have.
drawers = {"stage_us": draw_step, "distribution": draw_select, "shape": draw_project, "heads": draw_score}


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        result = json.load(file)
    key = next(key for key in drawers if key in result["rows"][0])
    figure = drawers[key](result)
    figure.savefig(sys.argv[2], metadata={"Date": None} if sys.argv[2].endswith(".svg") else None)


if __name__ == "__main__":
    main()
