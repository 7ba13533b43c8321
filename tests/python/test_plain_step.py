"""Whole steps of every cache format beside a step in plain torch, on the CPU device and on the GPU: the same bytes in the
cache, logits within a tolerance, and the winners that they call for."""

import pytest

import stepgraph

torch = pytest.importorskip("torch", reason="needs torch: there is none")

import plain_step as plain  # noqa: E402

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: torch sees none")
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
of_each_format = pytest.mark.parametrize("cache_format", ["fp8", "fp8_mx", "mxfp4", "mxfp4_rowgroup"])

TOP_K, ROWS, REQUESTS, COLUMNS, PAGES = 64, 8, 4, 24, 100
Q_LORA, HIDDEN = 256, 512
EPS = 1e-5
# Tokens and rows of each request: decode and verify rows, none, padding, lengths at a page's end, all keys selected. No row has
# so few keys that its largest logit, which tolerances are of, can be what a cancellation leaves.
STEPS = [
    ([200, 1536, 0, 65], [1, 3, 0, 1]),
    ([64, 1300, 130, 50], [1, 1, 5, 1]),
    ([201, 300, 40, 128], [0, 2, 1, 2]),
]


def tolerance(device, portable, cache_format):
    """Of a row's largest logit: of sums in FP32, and on the GPU of Hopper's scorer, as docs/limits.md says."""
    if device == "cpu" or portable:
        return 1e-5
    return 4e-3 if plain.is_mxfp4(cache_format) else 2e-3


class Step:
    """A pipeline of one layer over torch's tensors, and the same step in plain torch."""

    def __init__(self, device, cache_format, heads=32, projects=False, **options):
        self.device, self.cache_format, self.heads, self.projects = device, cache_format, heads, projects
        self.tolerance = tolerance(device, options.get("portable_scorer", False), cache_format)
        self.columns = heads + 128 + 16
        self.pipeline = stepgraph.Pipeline(
            stepgraph.Geometry(
                heads=heads,
                top_k=TOP_K,
                max_rows=ROWS,
                max_requests=REQUESTS,
                max_model_len=64 * COLUMNS,
                block_table_columns=COLUMNS,
                cache_format=stepgraph.CacheFormat[cache_format],
                pages=PAGES,
                page_stride_bytes=(4352 if plain.is_mxfp4(cache_format) else 8448) + 64,
                q_lora_rank=Q_LORA if projects else 0,
                hidden_size=HIDDEN if projects else 0,
                projected_columns=self.columns,
                key_column=heads,
                weight_column=0,
                k_norm_eps=EPS,
            ),
            device=device,
            **options,
        )
        self.step = {
            "seq_lens": self.empty(REQUESTS, dtype=torch.int32),
            "query_lens": self.empty(REQUESTS, dtype=torch.int32),
            "block_table": self.empty(REQUESTS, COLUMNS, dtype=torch.int32),
        }
        self.inputs = {"k_norm_weight": self.empty(128), "k_norm_bias": self.empty(128)}
        self.inputs |= {name: self.empty(*shape, dtype=torch.bfloat16) for name, shape in self.activations().items()}
        self.cache = self.empty(PAGES, self.pipeline.geometry.page_stride_bytes, dtype=torch.uint8)
        self.outputs = {
            "indices": self.empty(ROWS, TOP_K, dtype=torch.int32),
            "counts": self.empty(ROWS, dtype=torch.int32),
            "physical_slots": self.empty(ROWS, TOP_K, dtype=torch.int64),
            "winner_logits": self.empty(ROWS, TOP_K),
            "logits": self.empty(ROWS, 64 * COLUMNS),
        }
        workspace = self.empty(self.pipeline.workspace_bytes, dtype=torch.uint8)
        self.draw(0)
        layer = stepgraph.LayerBuffers(cache=self.cache, **self.inputs, **self.outputs)
        self.pipeline.bind(stepgraph.StepBuffers(**self.step), [layer], workspace)

    def activations(self):
        if not self.projects:
            return {"iq": (ROWS, self.heads * 128), "projected": (ROWS, self.columns)}
        return {
            "q_c": (ROWS, Q_LORA),
            "hidden": (ROWS, HIDDEN),
            "wq_b": (self.heads * 128, Q_LORA),
            "w_kv": (self.columns, HIDDEN),
        }

    def empty(self, *shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device=self.device)

    def randn(self, *shape):
        return torch.randn(shape, device=self.device)

    def draw(self, lengths):
        """Fills all inputs anew, where they lie, and poisons the outputs."""
        for tensor, numbers in zip((self.step["seq_lens"], self.step["query_lens"]), STEPS[lengths]):
            tensor.copy_(torch.tensor(numbers))
        pages = torch.randperm(PAGES, device=self.device)[: REQUESTS * COLUMNS]
        self.step["block_table"].copy_(pages.view(REQUESTS, COLUMNS))
        self.step["block_table"][1, 1:4] = self.step["block_table"][1, 0]  # keys that score the same
        for tensor in self.inputs.values():
            # Few bits where they are multiplied in the step: FP32 holds every sum, so that its order does not matter.
            tensor.copy_(self.randn(*tensor.shape))
            if self.projects:
                tensor.mul_(2).round_().clamp_(-8, 8).div_(4)
        self.inputs["k_norm_weight"].div_(8).add_(1)
        if not self.projects:
            self.inputs["iq"].mul_(2.0 ** torch.randint(-3, 4, (ROWS, 1), device=self.device))
            self.inputs["projected"][1, self.heads] = torch.inf  # LayerNorm makes a key of NaN of it
            self.inputs["projected"][2, self.heads : self.heads + 128] = 3  # and of this one the bias
            self.inputs["iq"][0, :128] = 0
        self.cache.random_(256)
        keys = self.randn(PAGES * 64, 128) * 2.0 ** torch.randint(-2, 3, (PAGES * 64, 1), device=self.device)
        plain.store(self.cache_format, self.cache, torch.arange(PAGES * 64, device=self.device), plain.bf16(keys))
        for tensor in self.outputs.values():
            tensor.fill_(77)
        self.cache_before = self.cache.clone()
        self.synchronise()  # weights may be read before what is in front of a step has ended

    def synchronise(self):
        if self.device == "cuda":
            torch.cuda.synchronize()

    def stream(self):
        return torch.cuda.current_stream() if self.device == "cuda" else None

    def enqueue(self):
        self.pipeline.enqueue_layout(ROWS, self.stream())
        self.pipeline.enqueue_layer(0, ROWS, self.stream())

    def rows(self):
        return plain.live_rows(self.step["seq_lens"], self.step["query_lens"], ROWS)

    def iq_and_projected(self):
        inputs = self.inputs
        if not self.projects:
            return inputs["iq"], inputs["projected"]
        return plain.project(inputs["q_c"], inputs["wq_b"]), plain.project(inputs["hidden"], inputs["w_kv"])

    def expect_cache(self):
        """That the step's keys lie where they belong, and all else is as it was."""
        _, projected = self.iq_and_projected()
        keys = projected[:, self.heads : self.heads + 128].float()
        keys = plain.layer_norm(keys, self.inputs["k_norm_weight"], self.inputs["k_norm_bias"], EPS)
        expected = self.cache_before.clone()
        plain.insert(self.cache_format, expected, self.step["block_table"], self.rows(), keys)
        assert torch.equal(self.cache, expected)

    def expect(self):
        """That cache and outputs are those of plain torch, from the inputs as they are now."""
        self.expect_cache()
        iq, projected = self.iq_and_projected()
        block_table, rows = self.step["block_table"], self.rows()
        query, weights = plain.query_and_weights(self.cache_format, iq, projected[:, : self.heads])
        for row, logits in enumerate(plain.score(self.cache_format, self.cache, block_table, rows, query, weights)):
            self.expect_row(row, logits, block_table[rows[row][0]].long())
        assert (self.outputs["indices"][len(rows) :] == -1).all()
        assert (self.outputs["counts"][len(rows) :] == 0).all()
        assert self.pipeline.status(self.stream()) == (0, 0, 0, 0)

    def expect_row(self, row, expected, blocks):
        found = {name: tensor[row] for name, tensor in self.outputs.items()}
        end, count = len(expected), min(TOP_K, len(expected))
        logits, winners = found["logits"][:end], found["indices"][:count].long()
        bound = self.tolerance * expected[~expected.isnan()].abs().max()
        assert torch.equal(logits.isnan(), expected.isnan())
        assert (logits - expected).abs().nan_to_num().max() <= bound
        assert torch.isneginf(found["logits"][end:]).all()

        # Each logit is off by the bound at most, and so is the worst winner's: twice that from it, both agree on who wins.
        rank = plain.ranks(expected)
        threshold = rank.sort(descending=True).values[count - 1]
        won = torch.zeros(end, dtype=torch.bool, device=self.device)
        won[winners] = True
        assert won[rank > threshold + 2 * bound].all()
        assert not won[rank < threshold - 2 * bound].any()

        # By its own logits, there is one right answer.
        assert torch.equal(winners, plain.select(logits, TOP_K))
        assert found["counts"] == count
        assert torch.equal(found["physical_slots"][:count], blocks[winners // 64] * 64 + winners % 64)
        assert torch.equal(found["winner_logits"][:count].nan_to_num(), logits[winners].nan_to_num())
        assert (found["indices"][count:] == -1).all()


@pytest.fixture(autouse=True)
def fresh_seed():
    seed = torch.seed()
    print(f"seed {seed}")


@on_each_device
@of_each_format
@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("portable", [False, True], ids=["default", "portable"])
def test_a_step_is_that_of_plain_torch(device, cache_format, heads, portable):
    if portable and device == "cpu":
        pytest.skip("needs an NVIDIA GPU: the host has one scorer")
    step = Step(device, cache_format, heads, portable_scorer=portable, portable_select=portable)
    for lengths in range(len(STEPS)):
        step.draw(lengths)
        step.enqueue()
        step.expect()


@on_each_device
@of_each_format
def test_a_step_from_projections_is_that_of_plain_torch(device, cache_format):
    step = Step(device, cache_format, projects=True)
    step.enqueue()
    step.expect()


@on_each_device
@of_each_format
@pytest.mark.parametrize("projects", [False, True])
def test_replays_see_the_inputs_of_their_time(device, cache_format, projects):
    step = Step(device, cache_format, projects=projects)
    step.pipeline.capture([ROWS])
    for lengths in (1, 2, 0, 1):
        step.draw(lengths)
        step.pipeline.replay(ROWS, step.stream())
        step.expect()


@needs_gpu
@of_each_format
@pytest.mark.parametrize("projects", [False, True])
def test_a_graph_of_torch_sees_the_inputs_of_its_time(cache_format, projects):
    step = Step("cuda", cache_format, projects=projects)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.enqueue()
    for lengths in (1, 2, 0, 1):
        step.draw(lengths)
        graph.replay()
        step.expect()


def numbers_of_exponent(exponent):
    """128 random ones of BF16, of either sign and of this biased exponent or up to four less, some a power of two; as FP32."""
    exponents = (exponent - torch.randint(5, (128,))).clamp(min=0)
    mantissas = torch.randint(128, (128,)) * (torch.rand(128) > 0.25)
    bits = torch.randint(2, (128,)) << 15 | exponents << 7 | mantissas
    return (bits << 16).to(torch.int32).view(torch.float32)


@on_each_device
@of_each_format
def test_adds_a_keys_columns_in_the_one_order(device, cache_format):
    """Large columns cancel in the mean, up to what rounding leaves in this order. The others are as small as that, and they
    alone have a weight."""
    step = Step(device, cache_format)
    for _ in range(10):
        step.draw(1)
        large = torch.randint(300, 1000, (ROWS, 32)).bfloat16()
        keys = torch.cat([large, -large, torch.randn(ROWS, 64) * 1e-5], 1)
        order = torch.randperm(128)
        step.inputs["projected"][:, step.heads : step.heads + 128] = keys[:, order].to(device, torch.bfloat16)
        step.inputs["k_norm_weight"].copy_(1e5 * (order >= 64))
        step.inputs["k_norm_bias"].zero_()
        step.enqueue()
        step.expect_cache()


@on_each_device
@of_each_format
def test_quantises_numbers_of_every_size(device, cache_format):
    """Weight 0 makes LayerNorm's bias the key, whatever it is: subnormal numbers, infinities and NaN too."""
    step = Step(device, cache_format)
    step.step["seq_lens"].fill_(60)
    step.step["query_lens"].fill_(2)
    step.inputs["projected"].fill_(1)
    step.inputs["k_norm_weight"].zero_()
    for exponent in range(256):
        step.inputs["k_norm_bias"].copy_(numbers_of_exponent(exponent))
        step.enqueue()
        step.expect_cache()
