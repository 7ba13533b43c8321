"""The case files on the CPU device: against what they expect, and bit for bit against the command."""

import subprocess

import numpy as np
import pytest

import stepgraph
from steps import CASES, COMMAND, DATA, Case, read_safetensors


def run_eager(pipeline, rows):
    pipeline.enqueue_layout(rows)
    pipeline.enqueue_layer(0, rows)


def run_captured(pipeline, rows):
    pipeline.capture([rows])
    pipeline.replay(rows)


@pytest.fixture(params=CASES)
def case(request):
    loaded = Case(request.param)
    loaded.name = request.param
    return loaded


@pytest.mark.parametrize("run", [run_eager, run_captured])
def test_gives_the_bits_of_the_command(case, run, tmp_path):
    out = tmp_path / "out.safetensors"
    path = DATA / f"{case.name}.safetensors"
    subprocess.run([COMMAND, "run", path, "--out", out, "--device", "cpu", "--logits", "--physical"], check=True)
    _, expected = read_safetensors(out)

    pipeline = stepgraph.Pipeline(case.geometry, device="cpu")
    assert pipeline.workspace_bytes == 0
    pipeline.bind(*case.buffers())
    run(pipeline, case.geometry.max_rows)
    for name in ("cache", "indices", "logits", "physical_slots"):
        assert case.layer[name].tobytes() == expected[name].tobytes(), name
    assert pipeline.status() == (0, 0, 0, 0)


def test_gives_what_the_file_expects(case):
    pipeline = stepgraph.Pipeline(case.geometry, device="cpu")
    pipeline.bind(*case.buffers())
    run_eager(pipeline, case.geometry.max_rows)
    mxfp4 = case.geometry.cache_format in (stepgraph.CacheFormat.mxfp4, stepgraph.CacheFormat.mxfp4_rowgroup)
    tolerance = 2e-2 if "q_c" in case.layer else 4e-3 if mxfp4 else 2e-3
    for row in range(case.expected["starts"][-1]):
        end = case.expected["ends"][row]
        expected = case.expected["logits"][row, :end]
        logits = case.layer["logits"][row]
        assert np.abs(logits[:end] - expected).max() <= tolerance * np.abs(expected).max()
        assert np.isneginf(logits[end:]).all()
        # By logit descending, then by position ascending, from the step's own logits.
        winners = np.sort(np.argsort(-logits[:end], kind="stable")[: case.geometry.top_k])
        count = case.layer["counts"][row]
        assert count == len(winners)
        assert (case.layer["indices"][row, :count] == winners).all()
        assert (case.layer["indices"][row, count:] == -1).all()
        assert (case.layer["winner_logits"][row, :count] == logits[winners]).all()
    assert (case.layer["indices"][case.expected["starts"][-1] :] == -1).all()


def test_reads_a_merged_page_through_a_view_of_its_index_section():
    whole, view = Case("mxfp4_merged_page_stride"), Case("mxfp4_merged_page_stride")
    view.layer["cache"] = view.layer["cache"][:, :4352]
    for case in (whole, view):
        pipeline = stepgraph.Pipeline(case.geometry, device="cpu")
        pipeline.bind(*case.buffers())
        run_eager(pipeline, case.geometry.max_rows)
    assert view.layer["logits"].tobytes() == whole.layer["logits"].tobytes()
    assert view.layer["cache"].base.tobytes() == whole.layer["cache"].tobytes()


def test_reads_inputs_where_they_lie_at_each_replay():
    case = Case("fp8_decode")
    pipeline = stepgraph.Pipeline(case.geometry, device="cpu")
    pipeline.bind(*case.buffers())
    pipeline.capture([3])
    case.step["seq_lens"][:] = [5, 0, 130]
    case.step["query_lens"][:] = [1, 0, 1]
    pipeline.replay(2)
    assert case.layer["counts"].tolist() == [5, 128, 0]
    case.step["block_table"][:] = 0
    case.step["block_table"][0, 0] = case.geometry.pages
    case.step["slots"][1] = case.geometry.pages * 64
    case.step["seq_lens"][2] = 2000
    case.step["query_lens"][2] = 9
    pipeline.replay(2)
    assert pipeline.status() == stepgraph.Status(invalid_slots=1, invalid_blocks=1, clamped_bounds=2, dropped_rows=1)
    pipeline.reset_status()
    assert pipeline.status() == (0, 0, 0, 0)


def test_keeps_the_tensors_that_it_was_bound_to():
    case = Case("fp8_decode")
    pipeline = stepgraph.Pipeline(case.geometry, device="cpu")
    pipeline.bind(*case.buffers())
    indices = case.layer["indices"]
    expected = Case("fp8_decode").expected
    del case
    churn = [np.zeros(1 << 16) for _ in range(100)]
    pipeline.enqueue_layout(3)
    pipeline.enqueue_layer(0, 3)
    assert len(churn) == 100 and indices.shape == expected["indices"].shape and (indices >= -1).all()


def test_calls_the_engine_after_each_layer_of_a_replay():
    case = Case("fp8_decode")
    pipeline = stepgraph.Pipeline(case.geometry, device="cpu")
    step, [layer] = case.buffers()
    pipeline.bind(step, [layer, layer])
    calls = []
    pipeline.capture([1, 3, 3], lambda layer, rows, stream: calls.append((layer, rows, stream)))
    assert pipeline.buckets == [1, 3]
    pipeline.replay(2, stream=0)
    assert calls == [(0, 3, 0), (1, 3, 0)]


def test_passes_an_exception_of_the_callback_on():
    case = Case("fp8_decode")
    pipeline = stepgraph.Pipeline(case.geometry, device="cpu")
    pipeline.bind(*case.buffers())

    class Own(Exception):
        pass

    def fail(layer, rows, stream):
        raise Own("of the engine")

    pipeline.capture([3], fail)
    with pytest.raises(Own, match="of the engine"):
        pipeline.replay(3)

    def misuse(layer, rows, stream):
        for call in (lambda: pipeline.bind(*case.buffers()), lambda: pipeline.capture([3]), lambda: pipeline.replay(3)):
            with pytest.raises(stepgraph.Error, match="was called from after_layer, must not be"):
                call()

    pipeline.capture([3], misuse)
    pipeline.replay(3)
    pipeline.capture([3])
    pipeline.replay(3)
    assert case.ran()


def test_lets_threads_take_turns():
    from concurrent.futures import ThreadPoolExecutor

    case = Case("fp8_decode")
    pipeline = stepgraph.Pipeline(case.geometry, device="cpu")
    pipeline.bind(*case.buffers())
    pipeline.capture([3], lambda *_: sum(range(1000)))
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: pipeline.replay(3), range(20)))
    assert case.ran()


def in_torch(bits):
    torch = pytest.importorskip("torch", reason="needs torch: there is none")
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def in_jax(bits):
    jax = pytest.importorskip("jax", reason="needs JAX: there is none")
    return jax.lax.bitcast_convert_type(jax.numpy.asarray(bits), jax.numpy.bfloat16)


@pytest.mark.parametrize("convert", [in_torch, in_jax])
def test_takes_the_bfloat16_of_other_libraries(convert):
    case = Case("fp8_decode")
    for name in ("iq", "projected"):
        case.layer[name] = convert(case.layer[name])
    pipeline = stepgraph.Pipeline(case.geometry, device="cpu")
    pipeline.bind(*case.buffers())
    run_eager(pipeline, 3)
    assert case.ran()


def test_has_the_version_of_the_command():
    printed = subprocess.run([COMMAND, "--version"], check=True, capture_output=True, text=True).stdout
    assert printed.strip() == f"stepgraph {stepgraph.__version__}"
