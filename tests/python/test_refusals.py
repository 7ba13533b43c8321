"""Everything that is wrong is refused with a sentence that names it; nothing of it crashes."""

import dataclasses
import re

import numpy as np
import pytest

import stepgraph
from steps import Case


def numbers(**changed):
    return {
        "max_rows": 4,
        "max_requests": 2,
        "max_model_len": 256,
        "block_table_columns": 4,
        "pages": 8,
        "heads": 16,
        "top_k": 8,
    } | changed


@pytest.fixture
def case():
    return Case("fp8_decode")


@pytest.fixture
def pipeline(case):
    return stepgraph.Pipeline(case.geometry, device="cpu")


def refused(kind, sentence):
    return pytest.raises(kind, match=re.escape(sentence))


# ---- the numbers -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changed", "kind", "sentence"),
    [
        ({"heads": 17}, stepgraph.Error, "geometry: heads is 17, must be 16, 32 or 64"),
        ({"top_k": 0}, stepgraph.Error, "geometry: top_k is 0, must be 1 to 4096"),
        ({"pages": 0}, stepgraph.Error, "geometry: pages is 0"),
        ({"q_lora_rank": 8}, stepgraph.Error, "geometry: hidden_size is 0, must be above 0"),
        ({"page_stride_bytes": 8450}, stepgraph.Error, "geometry: page_stride_bytes is 8450"),
        ({"dcp_rank": 1}, stepgraph.Error, "geometry: dcp.rank is 1"),
        ({"k_norm_eps": -1}, stepgraph.Error, "geometry: k_norm_eps is -1"),
        ({"k_norm_eps": float("nan")}, stepgraph.Error, "geometry: k_norm_eps is nan"),
        ({"heads": 16.0}, TypeError, "geometry: heads is 16.0, must be a whole number"),
        ({"heads": None}, TypeError, "geometry: heads is None, must be a whole number"),
        ({"max_rows": 1 << 31}, ValueError, "geometry: max_rows is 2147483648, must be a whole number of 32 bits"),
        ({"pages": 1 << 70}, ValueError, "must be a whole number of 64 bits"),
        ({"k_norm_eps": "1"}, TypeError, "geometry: k_norm_eps is '1', must be a number"),
        ({"cache_format": "fp8"}, TypeError, "geometry: cache_format is 'fp8', must be a stepgraph.CacheFormat"),
        ({"cache_format": 0}, TypeError, "geometry: cache_format is 0, must be a stepgraph.CacheFormat"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_refuses_numbers(changed, kind, sentence, device):
    with refused(kind, sentence) as caught:
        stepgraph.Pipeline(stepgraph.Geometry(**numbers(**changed)), device=device)
    if kind is stepgraph.Error:
        assert caught.value.code == "invalid_geometry"


@pytest.mark.parametrize(
    ("options", "kind", "sentence"),
    [
        ({"device": "gpu"}, ValueError, "device is 'gpu', must be 'cuda' or 'cpu'"),
        ({"tile_rows": -1}, stepgraph.Error, "options: tile_rows is -1"),
        ({"tile_rows": "2"}, TypeError, "tile_rows is '2', must be a whole number"),
        ({"tile_rows": None}, TypeError, "tile_rows is None, must be a whole number"),
        ({"portable_scorer": 1}, TypeError, "portable_scorer is a int, must be a bool"),
    ],
)
def test_refuses_options(options, kind, sentence):
    with refused(kind, sentence):
        stepgraph.Pipeline(stepgraph.Geometry(**numbers()), **options)


def test_refuses_what_is_no_geometry():
    with refused(TypeError, "geometry is a dict, must be a Geometry"):
        stepgraph.Pipeline(numbers())


def test_fills_in_defaults_and_takes_numpys_numbers():
    pipeline = stepgraph.Pipeline(stepgraph.Geometry(**numbers(pages=np.int32(8))))
    assert pipeline.geometry.page_stride_bytes == 8448
    assert pipeline.geometry.projected_columns == 128 + 16
    assert pipeline.geometry.width == 256
    assert pipeline.tile_rows == 4
    assert pipeline.workspace_bytes > 0
    assert pipeline.buckets == []
    assert pipeline.device == "cuda"


# ---- tensors ---------------------------------------------------------------------------------------------------------------
def strided(array):
    return np.repeat(array, 2, axis=-1)[..., ::2]


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("name", "change", "kind", "sentence"),
    [
        ("seq_lens", lambda a: a.astype(np.int64), TypeError, "step buffers: seq_lens is int64 [3], must be int32 [3]"),
        ("seq_lens", lambda a: a[:2], ValueError, "step buffers: seq_lens is int32 [2], must be int32 [3]"),
        ("seq_lens", strided, ValueError, "step buffers: seq_lens has strides of [2] elements, must have [1]: contiguous"),
        ("seq_lens", list, TypeError, "step buffers: seq_lens is a list, must be a tensor that exports DLPack"),
        ("seq_lens", lambda a: None, stepgraph.Error, "step buffers: seq_lens is null"),
        ("query_lens", lambda a: a[None], ValueError, "step buffers: query_lens is int32 [1, 3], must be int32 [3]"),
        ("block_table", lambda a: np.asfortranarray(a), ValueError, "step buffers: block_table has strides of [1, 3]"),
        ("block_table", lambda a: a[:, 1:], ValueError, "step buffers: block_table is int32 [3, 15], must be int32 [3, 16]"),
        ("slots", lambda a: a.astype(np.int32), TypeError, "step buffers: slots is int32 [3], must be int64 [3]"),
        ("num_requests", lambda a: np.zeros((), np.int32), ValueError, "step buffers: num_requests is int32 []"),
        ("iq", lambda a: a.astype(np.float32), TypeError, "layer 0: iq is float32 [3, 4096], must be bfloat16"),
        ("iq", lambda a: a.astype(np.float16), TypeError, "layer 0: iq is float16 [3, 4096], must be bfloat16"),
        ("iq", strided, ValueError, "layer 0: iq has strides of [8192, 2] elements, must have [4096, 1]: contiguous"),
        ("iq", lambda a: a[::-1], ValueError, "layer 0: iq has strides of [-4096, 1] elements"),
        ("iq", lambda a: np.broadcast_to(a[:1], a.shape), ValueError, "layer 0: iq has strides of [0, 1] elements"),
        ("iq", lambda a: None, stepgraph.Error, "layer 0: iq is null"),
        ("q_c", lambda a: np.zeros((3, 8), np.uint16), ValueError, "layer 0: q_c is a ndarray, must be None"),
        ("k_norm_bias", lambda a: a.astype(np.float64), TypeError, "layer 0: k_norm_bias is float64 [128]"),
        ("k_norm_bias", lambda a: np.zeros(129, np.float32)[1:], stepgraph.Error, "layer 0: k_norm_bias is 0x"),
        ("cache", lambda a: a.view(np.int8), TypeError, "layer 0: cache is int8 [24, 8448], must be uint8 [24, 8448]"),
        ("cache", lambda a: a[:, :8447], ValueError, "layer 0: cache is uint8 [24, 8447], must be uint8 [24, 8448]"),
        ("cache", read_only, TypeError, "layer 0: cache is a ndarray"),
        ("cache", lambda a: None, stepgraph.Error, "layer 0: cache is null"),
        ("indices", lambda a: a.astype(np.int64), TypeError, "layer 0: indices is int64 [3, 128], must be int32 [3, 128]"),
        ("indices", read_only, TypeError, "must be a tensor that exports DLPack and may be written"),
        ("indices", lambda a: a.astype(object), TypeError, "layer 0: indices is a ndarray"),
        ("logits", lambda a: a[:, :128], ValueError, "layer 0: logits is float32 [3, 128], must be float32 [3, 1024]"),
        ("counts", lambda a: "counts", TypeError, "layer 0: counts is a str, must be a tensor that exports DLPack"),
    ],
)
def test_refuses_tensors(pipeline, case, name, change, kind, sentence):
    owner = case.step if name in case.step or name == "num_requests" else case.layer
    owner[name] = change(owner.get(name))
    with refused(kind, sentence):
        pipeline.bind(*case.buffers())
    with refused(stepgraph.Error, "enqueue_layout was called before bind, must follow it"):
        pipeline.enqueue_layout(1)


def test_takes_inputs_that_may_not_be_written(pipeline, case):
    case.layer["iq"] = read_only(case.layer["iq"])
    case.step["seq_lens"] = read_only(case.step["seq_lens"])
    pipeline.bind(*case.buffers())


def test_refuses_host_memory_on_the_gpu(case):
    pipeline = stepgraph.Pipeline(case.geometry)
    with refused(ValueError, "step buffers: seq_lens is in host memory, must be in CUDA memory, the pipeline's"):
        pipeline.bind(*case.buffers(), np.zeros(pipeline.workspace_bytes, np.uint8))


def test_passes_on_why_an_array_library_exports_nothing(pipeline, case):
    class Deleted:
        def __dlpack__(self, **_):
            raise RuntimeError("the array was deleted")

    case.layer["iq"] = Deleted()
    with refused(TypeError, "Deleted (the array was deleted), must be a tensor that exports DLPack"):
        pipeline.bind(*case.buffers())


@pytest.mark.parametrize("wrong", [0, "tensor", object()])
def test_refuses_a_capsule_that_is_none(pipeline, case, wrong):
    class Odd:
        def __dlpack__(self, **_):
            return wrong

    case.layer["iq"] = Odd()
    with refused(TypeError, "layer 0: iq is a "):
        pipeline.bind(*case.buffers())


def test_refuses_a_workspace_that_is_no_bytes(pipeline, case):
    for wrong in (np.zeros(8, np.float32), strided(np.zeros(8, np.uint8)), np.zeros((2, 4), np.uint8), 7):
        with pytest.raises((TypeError, ValueError), match="workspace "):
            pipeline.bind(*case.buffers(), wrong)


def test_refuses_what_are_no_buffers(pipeline, case):
    step, layers = case.buffers()
    with refused(TypeError, "step is a dict, must be a StepBuffers"):
        pipeline.bind(case.step, layers)
    with refused(TypeError, "layers is a LayerBuffers, must be a Sequence"):
        pipeline.bind(step, layers[0])
    with refused(TypeError, "layers[1] is a NoneType, must be a LayerBuffers"):
        pipeline.bind(step, [layers[0], None])
    with refused(stepgraph.Error, "layers is empty, must hold the buffers of at least one layer"):
        pipeline.bind(step, [])
    with pytest.raises(TypeError, match="unexpected keyword argument 'seq_len'"):
        stepgraph.StepBuffers(**case.step, seq_len=None)


def test_stays_as_it_was_where_bind_fails(pipeline, case):
    step, layers = case.buffers()
    pipeline.bind(step, layers)
    pipeline.capture([3])
    with refused(stepgraph.Error, "layer 0: indices is null"):
        pipeline.bind(step, [dataclasses.replace(layers[0], indices=None)])
    pipeline.replay(3)
    assert case.ran()
    pipeline.bind(step, layers)
    with refused(stepgraph.Error, "replay was called before capture, must follow it"):
        pipeline.replay(3)


# ---- calls -----------------------------------------------------------------------------------------------------------------
CALLS = {
    "capture": lambda p: p.capture([1]),
    "replay": lambda p: p.replay(1, 0),
    "enqueue_layout": lambda p: p.enqueue_layout(1, 0),
    "enqueue_layer": lambda p: p.enqueue_layer(0, 1, 0),
    "read_status": lambda p: p.status(0),
    "reset_status": lambda p: p.reset_status(0),
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", CALLS)
def test_refuses_calls_before_bind(device, name):
    with refused(stepgraph.Error, f"{name} was called before bind, must follow it") as caught:
        CALLS[name](stepgraph.Pipeline(stepgraph.Geometry(**numbers()), device=device))
    assert caught.value.code == "wrong_order"


@pytest.mark.parametrize(
    ("call", "kind", "sentence"),
    [
        (lambda p: p.capture([]), stepgraph.Error, "buckets is empty, must hold at least one row count"),
        (lambda p: p.capture([4]), stepgraph.Error, "a bucket is 4 rows, must be 1 to max_rows (3)"),
        (lambda p: p.capture([1, "2"]), TypeError, "buckets[1] is '2', must be a whole number"),
        (lambda p: p.capture(3), TypeError, "buckets is 3, must hold whole numbers"),
        (lambda p: p.capture(None), TypeError, "buckets is None, must hold whole numbers"),
        (lambda p: p.capture([3], 7), TypeError, "after_layer is 7, must be callable or None"),
        (lambda p: p.replay(1), stepgraph.Error, "replay was called before capture, must follow it"),
        (lambda p: p.enqueue_layout(0), stepgraph.Error, "rows is 0, must be 1 to max_rows (3)"),
        (lambda p: p.enqueue_layout(1.5), TypeError, "rows is 1.5, must be a whole number"),
        (lambda p: p.enqueue_layout(None), TypeError, "rows is None, must be a whole number"),
        (lambda p: p.replay(None), TypeError, "rows is None, must be a whole number"),
        (lambda p: p.enqueue_layer(None, 3), TypeError, "layer is None, must be a whole number"),
        (lambda p: p.enqueue_layer(0, None), TypeError, "rows is None, must be a whole number"),
        (lambda p: p.enqueue_layout(1 << 40), ValueError, "must be a whole number of 32 bits"),
        (lambda p: p.enqueue_layer(0, 3), stepgraph.Error, "enqueue_layer was called before enqueue_layout"),
        (lambda p: p.enqueue_layer(1, 3), stepgraph.Error, "layer is 1, must be 0 to 0, for 1 were bound"),
        (lambda p: p.enqueue_layer(-1, 3), stepgraph.Error, "layer is -1"),
    ],
)
def test_refuses_calls(pipeline, case, call, kind, sentence):
    pipeline.bind(*case.buffers())
    with refused(kind, sentence):
        call(pipeline)


def test_refuses_a_layer_whose_layout_a_replay_has_overwritten(pipeline, case):
    pipeline.bind(*case.buffers())
    pipeline.capture([3])
    pipeline.enqueue_layout(3)
    pipeline.replay(2)
    with refused(stepgraph.Error, "enqueue_layer was called before enqueue_layout"):
        pipeline.enqueue_layer(0, 3)


def test_refuses_rows_that_were_not_made_ready(pipeline, case):
    pipeline.bind(*case.buffers())
    pipeline.capture([1, 2])
    with refused(stepgraph.Error, "rows is 3, must be 1 to the largest captured bucket (2)"):
        pipeline.replay(3)
    pipeline.enqueue_layout(2)
    with refused(stepgraph.Error, "rows is 3, must be 2, for which the layout was enqueued"):
        pipeline.enqueue_layer(0, 3)


class Stream:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Protocol:
    def __init__(self, answer=(0, 0)):
        self.answer = answer

    def __cuda_stream__(self):
        return self.answer


WRONG_STREAMS = [
    "0",
    1.5,
    -1,
    True,
    1 << 64,
    object(),
    Stream(cuda_stream="0"),
    Stream(ptr=-1),
    Protocol(7),
    Protocol((0,)),
    Protocol((0, "0")),
]


@pytest.mark.parametrize("wrong", WRONG_STREAMS)
def test_refuses_what_is_no_stream(pipeline, case, wrong):
    pipeline.bind(*case.buffers())
    with refused(TypeError, "must be a CUDA stream: its address as an integer, or an object with .cuda_stream"):
        pipeline.enqueue_layout(1, wrong)


@pytest.mark.parametrize("stream", [None, 0, Stream(cuda_stream=0), Stream(ptr=0), Protocol()])
def test_takes_streams_of_every_kind(pipeline, case, stream):
    pipeline.bind(*case.buffers())
    pipeline.enqueue_layout(1, stream)


def test_wants_a_stream_on_the_gpu():
    with refused(TypeError, "stream is None, must be a CUDA stream"):
        stepgraph.Pipeline(stepgraph.Geometry(**numbers())).replay(1)
