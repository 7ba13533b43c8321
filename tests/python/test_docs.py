"""The documents: their Python snippets run, on the CPU device and with a stand-in for torch, and their links lead somewhere."""

import contextlib
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import stepgraph
from steps import Case

ROOT = Path(__file__).parents[2]

TORCH = SimpleNamespace(
    empty=lambda *shape, dtype, device: np.empty(shape, dtype),
    uint8=np.uint8,
    cuda=SimpleNamespace(
        CUDAGraph=lambda: None,
        graph=contextlib.nullcontext,
        current_stream=lambda: SimpleNamespace(cuda_stream=0),
    ),
)


def snippets(document):
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL)


def test_readme():
    [snippet] = snippets("README.md")
    names = {
        "torch": TORCH,
        "stepgraph": SimpleNamespace(**vars(stepgraph) | {"Pipeline": partial(stepgraph.Pipeline, device="cpu")}),
        "seq_lens": np.full(64, 3, np.int32),
        "query_lens": np.eye(1, 64, dtype=np.int32)[0],
        "block_table": np.zeros((64, 2048), np.int32),
        "iq": np.zeros((128, 32 * 128), np.uint16),
        "projected": np.zeros((128, 128 + 32), np.uint16),
        "weight": np.ones(128, np.float32),
        "bias": np.zeros(128, np.float32),
        "cache": np.zeros((65536, 8448), np.uint8),
        "indices": np.zeros((128, 2048), np.int32),
        "rows": 1,
    }
    exec(snippet, names)
    assert names["indices"][0, :4].tolist() == [0, 1, 2, -1]


def test_embedding():
    [snippet] = snippets("docs/embedding.md")
    case = Case("fp8_decode")
    pipeline = stepgraph.Pipeline(case.geometry, device="cpu")
    pipeline.bind(*case.buffers())
    calls = []
    exec(snippet, {"torch": TORCH, "pipeline": pipeline, "rows": 3, "layers": 1, "attention": lambda *at: calls.append(at)})
    assert calls == [(0, 3)] and case.ran()


@pytest.mark.parametrize("document", [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")], ids=lambda path: path.name)
def test_links_lead_to_files(document):
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (document.parent / link).exists(), link
