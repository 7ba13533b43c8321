#!/usr/bin/env python3
"""Says which cells of a benchmark got slower or faster from one result to another.

    compare.py OLD NEW [--threshold 0.05]

A cell got slower where its median grew by more than the threshold and its fastest measurement is slower than the slowest
one before; faster the other way round. Results of two GPUs differ as their read ceilings do: both are printed.

Exit status: 0, or 1 where a cell got slower or its result is wrong, or 2 where a file cannot be used.
"""
import argparse
import json
import sys

# What a cell was measured to be; all else says which cell it is.
MEASURED = {
    "us", "us_min", "us_max", "checked", "max_error", "mismatches",
    "host_us", "stage_us", "step_us", "layout_us",
    "caches", "floor_bytes", "key_bytes", "weight_bytes",
}


class Unusable(Exception):
    """A file that is no result, or an option that makes no sense."""


def cells_of(path: str) -> tuple[dict, dict]:
    """The result, and its rows by what they are."""
    try:
        with open(path, encoding="utf-8") as file:
            result = json.load(file)
        cells = {tuple((key, row[key]) for key in sorted(row) if key not in MEASURED): row for row in result["rows"]}
        for row in cells.values():
            if not all(row[time] > 0 for time in ("us", "us_min", "us_max")):
                raise ValueError("a row with times above 0 is expected")
        float(result["ceiling_tb_s"])
        return result, cells
    except OSError as error:
        raise Unusable(f"{path}: {error.strerror}, must be a result of a benchmark") from error
    except (KeyError, TypeError, ValueError) as error:
        raise Unusable(f"{path}: {type(error).__name__}: {error}; must be a result of a benchmark") from error


def change_of(old: dict, new: dict, threshold: float) -> str:
    if new["us"] > old["us"] * (1 + threshold) and new["us_min"] > old["us_max"]:
        return "slower"
    if old["us"] > new["us"] * (1 + threshold) and old["us_min"] > new["us_max"]:
        return "faster"
    return ""


def compare(old_path: str, new_path: str, threshold: float) -> int:
    old_result, old = cells_of(old_path)
    new_result, new = cells_of(new_path)
    both = [cell for cell in new if cell in old]
    changes = [(new[cell]["us"] / old[cell]["us"], cell) for cell in both if change_of(old[cell], new[cell], threshold)]
    for ratio, cell in sorted(changes, key=lambda change: -change[0]):
        name = ", ".join(f"{key} {value}" for key, value in cell)
        print(f"{change_of(old[cell], new[cell], threshold)} {ratio:.3f} times: "
              f"{old[cell]['us']:.2f} to {new[cell]['us']:.2f} us: {name}")
    wrong = [cell for cell in new if new[cell].get("mismatches", 0) != 0]
    for cell in wrong:
        print(f"wrong: {new[cell]['mismatches']} mismatches: " + ", ".join(f"{key} {value}" for key, value in cell))
    slower = sum(ratio > 1 for ratio, _ in changes)
    print(f"{len(both)} cells compared, {slower} slower, {len(changes) - slower} faster, {len(wrong)} wrong; "
          f"{len(old) - len(both)} only in {old_path}, {len(new) - len(both)} only in {new_path}; "
          f"read ceilings {old_result['ceiling_tb_s']:.2f} and {new_result['ceiling_tb_s']:.2f} TB/s")
    return 1 if slower or wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="OLD")
    parser.add_argument("new", metavar="NEW")
    parser.add_argument("--threshold", type=float, default=0.05, help="share of the old time (default 0.05)")
    arguments = parser.parse_args()
    try:
        if not arguments.threshold >= 0:
            raise Unusable(f"--threshold is {arguments.threshold}, must be at least 0")
        return compare(arguments.old, arguments.new, arguments.threshold)
    except Unusable as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
