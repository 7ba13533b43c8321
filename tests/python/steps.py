"""Steps for the tests: the case files, and random ones."""

import json
import os
from pathlib import Path

import numpy as np

import stepgraph

DATA = Path(__file__).parents[1] / "data"
COMMAND = os.environ.get("STEPGRAPH_COMMAND", "stepgraph")
CASES = sorted(path.stem for path in DATA.glob("*.safetensors"))

_dtypes = {"BF16": np.uint16, "F32": np.float32, "I32": np.int32, "I64": np.int64, "U8": np.uint8}


def read_safetensors(path):
    """Metadata and arrays; bfloat16 as its bits. Copied, for nothing aligns them in a file."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    metadata = header.pop("__metadata__", {})
    arrays = {}
    for name, tensor in header.items():
        first, last = (begin + offset for offset in tensor["data_offsets"])
        arrays[name] = np.frombuffer(data[first:last], _dtypes[tensor["dtype"]]).reshape(tensor["shape"]).copy()
    return metadata, arrays


def outputs_of(geometry):
    """Every output, poisoned: what is not written shows."""
    g = geometry
    return {
        "indices": np.full((g.max_rows, g.top_k), -77, np.int32),
        "counts": np.full(g.max_rows, -77, np.int32),
        "physical_slots": np.full((g.max_rows, g.top_k), -77, np.int64),
        "winner_logits": np.full((g.max_rows, g.top_k), np.nan, np.float32),
        "logits": np.full((g.max_rows, g.width), np.nan, np.float32),
    }


class Case:
    """A case file: its geometry, its tensors as NumPy arrays, poisoned outputs, and what the file expects."""

    def __init__(self, name):
        metadata, arrays = read_safetensors(DATA / f"{name}.safetensors")
        self.expected = {key.removeprefix("expected."): array for key, array in arrays.items() if "." in key}
        rows = (arrays["iq"] if "iq" in arrays else arrays["q_c"]).shape[0]
        requests, columns = arrays["block_table"].shape
        projected = arrays["projected"].shape[1] if "projected" in arrays else arrays["w_kv"].shape[0]
        self.geometry = stepgraph.Geometry(
            heads=int(metadata["heads"]),
            top_k=int(metadata["topk"]),
            max_rows=rows,
            max_requests=requests,
            max_model_len=int(metadata["max_model_len"]),
            block_table_columns=columns,
            cache_format=stepgraph.CacheFormat[metadata["cache_format"]],
            pages=arrays["cache"].shape[0],
            page_stride_bytes=int(metadata["page_stride"]),
            q_lora_rank=arrays["q_c"].shape[1] if "q_c" in arrays else 0,
            hidden_size=arrays["hidden"].shape[1] if "hidden" in arrays else 0,
            projected_columns=projected,
            key_column=int(metadata["key_column"]),
            weight_column=int(metadata["weight_column"]),
            k_norm_eps=float(metadata["eps"]),
            dcp_world_size=int(metadata["dcp_world_size"]),
            dcp_rank=int(metadata["dcp_rank"]),
            dcp_interleave=int(metadata["dcp_interleave"]),
        )
        self.step = {
            "seq_lens": arrays["seq_lens"][:requests],
            "query_lens": arrays["query_lens"],
            "block_table": arrays["block_table"],
            "slots": arrays.get("slots"),
        }
        inputs = ("q_c", "hidden", "wq_b", "w_kv", "iq", "projected", "k_norm_weight", "k_norm_bias", "cache")
        self.layer = {key: arrays[key] for key in inputs if key in arrays} | outputs_of(self.geometry)

    def buffers(self):
        return stepgraph.StepBuffers(**self.step), [stepgraph.LayerBuffers(**self.layer)]

    def ran(self):
        """Whether every row's results are there."""
        return (self.layer["counts"] == np.minimum(self.expected["ends"], self.geometry.top_k)).all()
