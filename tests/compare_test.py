"""What bench/compare.py says of two results, and how it ends."""
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

PROGRAM = pathlib.Path(__file__).parent.parent / "bench" / "compare.py"


def row(us: float, **fields) -> dict:
    return {"requests": 1, "context": 4096, "us": us, "us_min": us * 0.99, "us_max": us * 1.01, "mismatches": 0} | fields


class Compare(unittest.TestCase):
    def compare(self, old, new, *options: str) -> tuple[int, str]:
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for name, rows in (("old.json", old), ("new.json", new)):
                path = pathlib.Path(folder) / name
                path.write_text(rows if isinstance(rows, str) else json.dumps({"ceiling_tb_s": 4.5, "rows": rows}))
                paths.append(str(path))
            ended = subprocess.run([sys.executable, PROGRAM, *paths, *options], capture_output=True, text=True, check=False)
            return ended.returncode, ended.stdout + ended.stderr

    def test_the_same_result_is_neither_slower_nor_faster(self):
        status, printed = self.compare([row(10)], [row(10)])
        self.assertEqual(status, 0)
        self.assertIn("1 cells compared, 0 slower, 0 faster, 0 wrong", printed)

    def test_a_slower_cell_is_named_and_fails(self):
        status, printed = self.compare([row(10), row(20, context=8192)], [row(11), row(20, context=8192)])
        self.assertEqual(status, 1)
        self.assertIn("slower 1.100 times: 10.00 to 11.00 us: context 4096, requests 1", printed)
        self.assertNotIn("8192", printed)

    def test_a_faster_cell_is_named_and_passes(self):
        status, printed = self.compare([row(11)], [row(10)])
        self.assertEqual(status, 0)
        self.assertIn("faster 0.909 times", printed)

    def test_a_change_below_the_threshold_is_none(self):
        self.assertEqual(self.compare([row(10)], [row(10.4)])[0], 0)
        self.assertEqual(self.compare([row(10)], [row(10.4)], "--threshold", "0.01")[0], 1)

    def test_a_change_within_the_spread_is_none(self):
        self.assertEqual(self.compare([row(10, us_max=12)], [row(11)])[0], 0)

    def test_cells_are_found_whatever_was_measured_of_them(self):
        old = row(10, stage_us={"score": 5}, host_us=2, floor_bytes=1)
        new = row(10, stage_us={"score": 6}, host_us=3, floor_bytes=2)
        self.assertIn("1 cells compared", self.compare([old], [new])[1])

    def test_cells_of_one_result_alone_are_counted(self):
        printed = self.compare([row(10), row(10, context=1)], [row(10), row(9, context=2), row(9, context=3)])[1]
        self.assertRegex(printed, r"1 cells compared.*; 1 only in \S+old.json, 2 only in \S+new.json")

    def test_a_wrong_result_fails(self):
        status, printed = self.compare([row(10)], [row(9, mismatches=3)])
        self.assertEqual(status, 1)
        self.assertIn("wrong: 3 mismatches: context 4096", printed)

    def test_what_cannot_be_used_is_named(self):
        rows = [row(10)]
        for old in ("no JSON", "{}", '{"ceiling_tb_s": 1, "rows": [{"us": "x"}]}'):
            status, printed = self.compare(old, rows)
            self.assertEqual(status, 2)
            self.assertRegex(printed, r"compare.py: \S+old.json: .*must be a result of a benchmark\n$")
        self.assertIn("--threshold is -1.0, must be at least 0", self.compare(rows, rows, "--threshold", "-1")[1])
        self.assertEqual(subprocess.run([sys.executable, PROGRAM, "a", "b"], capture_output=True, check=False).returncode, 2)


if __name__ == "__main__":
    unittest.main()
