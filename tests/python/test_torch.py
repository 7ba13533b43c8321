"""Whole steps over torch's tensors, against a plain torch implementation: on the GPU, and with the reference on the CPU."""

from functools import partial

import pytest

import stepgraph

torch = pytest.importorskip("torch", reason="needs torch: there is none")

import plain_step  # noqa: E402

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: torch sees none")

HEADS, TOP_K, ROWS, REQUESTS, COLUMNS, PAGES, LAYERS = 32, 64, 8, 4, 8, 64, 3
Q_LORA, HIDDEN = 256, 512
GEOMETRY = stepgraph.Geometry(
    heads=HEADS,
    top_k=TOP_K,
    max_rows=ROWS,
    max_requests=REQUESTS,
    max_model_len=64 * COLUMNS,
    block_table_columns=COLUMNS,
    pages=PAGES,
    q_lora_rank=Q_LORA,
    hidden_size=HIDDEN,
)


def normal(*shape):
    return torch.randn(shape, device="cuda").to(torch.bfloat16)


class Model:
    """Random tensors of a step, and what plain torch makes of them."""

    def __init__(self, device="cuda", layers=LAYERS):
        self.device = device
        self.seq_lens = torch.tensor([200, 512, 0, 65], dtype=torch.int32, device=device)
        self.query_lens = torch.tensor([1, 3, 0, 1], dtype=torch.int32, device=device)
        pages = torch.randperm(PAGES, device=device)[: REQUESTS * COLUMNS]
        self.block_table = pages.view(REQUESTS, COLUMNS).to(torch.int32)
        self.layers = [self.make_layer() for _ in range(layers)]

    def make_layer(self):
        randn = partial(torch.randn, device=self.device)
        empty = partial(torch.empty, device=self.device)
        return {
            "q_c": randn(ROWS, Q_LORA).to(torch.bfloat16),
            "hidden": randn(ROWS, HIDDEN).to(torch.bfloat16),
            "wq_b": randn(HEADS * 128, Q_LORA).to(torch.bfloat16) / 16,
            "w_kv": randn(128 + HEADS, HIDDEN).to(torch.bfloat16) / 16,
            "k_norm_weight": 1 + randn(128) / 8,
            "k_norm_bias": randn(128) / 8,
            "cache": pack(randn(PAGES, 64, 128)),
            "indices": empty(ROWS, TOP_K, dtype=torch.int32),
            "counts": empty(ROWS, dtype=torch.int32),
            "physical_slots": empty(ROWS, TOP_K, dtype=torch.int64),
            "winner_logits": empty(ROWS, TOP_K, dtype=torch.float32),
            "logits": empty(ROWS, 64 * COLUMNS, dtype=torch.float32),
        }

    def pipeline(self, **options):
        pipeline = stepgraph.Pipeline(GEOMETRY, device=self.device, **options)
        step = stepgraph.StepBuffers(
            seq_lens=self.seq_lens, query_lens=self.query_lens, block_table=self.block_table
        )
        layers = [stepgraph.LayerBuffers(**layer) for layer in self.layers]
        workspace = torch.empty(pipeline.workspace_bytes, dtype=torch.uint8, device=self.device)
        if self.device == "cuda":
            torch.cuda.synchronize()
        pipeline.bind(step, layers, workspace)
        self.poison()
        return pipeline

    def rows(self):
        """Request and bound of every live row."""
        return plain_step.live_rows(self.seq_lens, self.query_lens, ROWS)

    def expect(self):
        for layer in self.layers:
            expected = expected_logits(layer, self.block_table, self.rows())
            for row, (_, end) in enumerate(self.rows()):
                logits = layer["logits"][row]
                bound = 2e-2 * expected[row].abs().max()
                assert (logits[:end] - expected[row]).abs().max() <= bound
                assert torch.isneginf(logits[end:]).all()
                winners = plain_step.select(logits[:end], TOP_K).to(torch.int32)
                assert layer["counts"][row] == len(winners)
                assert torch.equal(layer["indices"][row, : len(winners)], winners)
            assert (layer["indices"][len(self.rows()) :] == -1).all()

    def poison(self):
        for layer in self.layers:
            for name in ("indices", "counts", "physical_slots", "winner_logits", "logits"):
                layer[name].fill_(77)


def pack(keys):
    """FP8 pages of keys [pages, 64, 128]."""
    cache = torch.empty(len(keys), 64 * 132, dtype=torch.uint8, device=keys.device)
    slots = torch.arange(len(keys) * 64, device=keys.device)
    plain_step.store("fp8", cache, slots, keys.to(torch.bfloat16).float().flatten(0, 1))
    return cache


def expected_logits(layer, block_table, rows):
    """From the layer's inputs, and from its cache after the step: test_plain_step.py has its new keys."""
    iq = plain_step.project(layer["q_c"], layer["wq_b"])
    packed = plain_step.project(layer["hidden"], layer["w_kv"])
    query, weights = plain_step.query_and_weights("fp8", iq, packed[:, 128:])
    return plain_step.score("fp8", layer["cache"], block_table, rows, query, weights)


@pytest.fixture(autouse=True)
def fresh_seed():
    seed = torch.seed()
    print(f"seed {seed}")


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_an_eager_step_is_torchs(device, portable):
    model = Model(device)
    pipeline = model.pipeline(portable_scorer=portable)
    stream = torch.cuda.current_stream() if device == "cuda" else None
    pipeline.enqueue_layout(ROWS, stream)
    for layer in range(LAYERS):
        pipeline.enqueue_layer(layer, ROWS, stream)
    assert pipeline.status(stream) == (0, 0, 0, 0)
    model.expect()


@needs_gpu
def test_a_replay_calls_what_the_engine_captured_between_the_layers():
    model = Model()
    pipeline = model.pipeline()
    sums = torch.zeros(LAYERS, dtype=torch.int64, device="cuda")
    calls = []

    def after_layer(layer, rows, stream):
        calls.append((layer, rows))
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            sums[layer].add_(1)

    torch.cuda.synchronize()
    pipeline.capture([2, ROWS], after_layer)
    assert calls == [(layer, rows) for rows in (2, ROWS) for layer in range(LAYERS)]
    stream = torch.cuda.Stream()
    for _ in range(5):
        model.poison()
        stream.wait_stream(torch.cuda.current_stream())
        pipeline.replay(5, stream)
        torch.cuda.current_stream().wait_stream(stream)
        model.expect()
    assert sums.tolist() == [5] * LAYERS
    assert len(calls) == 2 * LAYERS


@needs_gpu
def test_an_exception_of_the_callback_ends_the_capture():
    model = Model()
    pipeline = model.pipeline()

    def fail(layer, rows, stream):
        raise KeyError("of the engine")

    with pytest.raises(KeyError, match="of the engine"):
        pipeline.capture([ROWS], fail)
    with pytest.raises(stepgraph.Error, match="replay was called before capture"):
        pipeline.replay(ROWS, 0)
    pipeline.capture([ROWS])
    pipeline.replay(ROWS, torch.cuda.current_stream())
    model.expect()


@needs_gpu
def test_a_step_is_captured_by_torch():
    model = Model()
    pipeline = model.pipeline()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream()
        pipeline.enqueue_layout(ROWS, stream)
        for layer in range(LAYERS):
            pipeline.enqueue_layer(layer, ROWS, stream)
            if layer + 1 < LAYERS:
                # Stands in for attention: the next layer's input depends on what this one selected.
                model.layers[layer + 1]["hidden"].add_((model.layers[layer]["counts"] * 0).unsqueeze(1))
    for _ in range(3):
        model.poison()
        graph.replay()
        model.expect()


@needs_gpu
def test_refuses_tensors_of_another_place_or_kind():
    model = Model(layers=1)
    for name, change, kind, sentence in (
        ("iq", lambda: normal(ROWS, HEADS * 128), stepgraph.Error, "must be null where iq and projected are handed over"),
        ("hidden", lambda: normal(ROWS, HIDDEN).cpu(), ValueError, "layer 0: hidden is in host memory"),
        ("hidden", lambda: normal(ROWS, HIDDEN).half(), TypeError, "layer 0: hidden is float16"),
        ("hidden", lambda: normal(HIDDEN, ROWS).T, ValueError, "layer 0: hidden has strides of"),
        ("hidden", lambda: normal(ROWS, HIDDEN).requires_grad_(), TypeError, "layer 0: hidden is a"),
        ("hidden", lambda: normal(ROWS * HIDDEN + 1)[1:].view(ROWS, HIDDEN), stepgraph.Error, "layer 0: hidden is 0x"),
        ("cache", lambda: model.layers[0]["cache"].view(torch.float8_e4m3fn), TypeError, "layer 0: cache is"),
    ):
        broken = Model(layers=1)
        broken.layers[0][name] = change()
        with pytest.raises(kind, match=sentence):
            broken.pipeline()


@needs_gpu
def test_refuses_tensors_of_another_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU: there is one")
    model = Model(layers=1)
    with torch.cuda.device(1), pytest.raises(stepgraph.Error, match="must be on device 1, the current one"):
        model.pipeline()
