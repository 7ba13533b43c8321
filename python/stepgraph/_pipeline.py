"""The decode step of a sparse-attention indexer: made ready once, replayed per token."""

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from . import _core
from ._arguments import AfterLayer, Geometry, LayerBuffers, Status, StepBuffers, Stream, Tensor

Device = Literal["cuda", "cpu"]


class Pipeline:
    """Stages of use: construct, ``workspace_bytes``, ``bind``, ``capture``, ``replay``; or, at any time after ``bind``,
    ``enqueue_layout`` and then ``enqueue_layer`` for each layer, eagerly or inside the engine's own capture
    (``torch.cuda.graph``).

    ``device="cuda"`` works on the GPU that is current at ``bind``. ``device="cpu"`` runs the library's reference on the host, to
    try things out and to test: tensors lie in host memory, streams are not looked at, a call has run when it returns, and
    the callback of ``capture`` is called in each replay.

    All steps of a pipeline work in its one workspace: let them follow each other, on one stream or ordered by events. Two
    pipelines are independent. Calls of several Python threads follow each other; while one runs, the interpreter is free.
    Errors are ``stepgraph.Error``, TypeError and ValueError, each with a sentence that names the argument.

    The options are those of ``stepgraph::Options``: ``programmatic_edges`` lets kernels start before their predecessors have
    ended; ``portable_scorer`` scores with the kernel that runs everywhere; ``portable_select`` selects with the kernel that
    runs everywhere; a tile of logits has room for ``tile_rows`` rows (0: a default of the geometry).
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        device: Device = "cuda",
        programmatic_edges: bool = True,
        portable_scorer: bool = False,
        portable_select: bool = False,
        tile_rows: int = 0,
    ) -> None:
        """Needs no GPU."""
        _expect(geometry, "geometry", Geometry)
        if device not in get_args(Device):
            raise ValueError(f"device is {device!r}, must be 'cuda' or 'cpu'")
        for name, value in (
            ("programmatic_edges", programmatic_edges),
            ("portable_scorer", portable_scorer),
            ("portable_select", portable_select),
        ):
            _expect(value, name, bool)
        memory = _core.Memory.device if device == "cuda" else _core.Memory.host
        self._device: Device = device
        self._core = _core.Core(geometry, memory, programmatic_edges, portable_scorer, portable_select, tile_rows)
        self._after_layer: AfterLayer | None = None

    @property
    def device(self) -> Device:
        return self._device

    @property
    def geometry(self) -> Geometry:
        """The geometry with its defaults filled in."""
        return Geometry(**self._core.geometry)

    @property
    def tile_rows(self) -> int:
        """Query rows that a tile of logits has room for, whatever their lengths."""
        return self._core.tile_rows

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory that ``bind`` wants; 0 on the CPU."""
        return self._core.workspace_bytes

    @property
    def buckets(self) -> list[int]:
        """Captured buckets in ascending order."""
        return self._core.buckets

    def bind(self, step: StepBuffers, layers: Sequence[LayerBuffers], workspace: Tensor | None = None) -> None:
        """Fixes the tensors: their memory is used where it lies from here on, and kept from being freed until another
        ``bind`` or the pipeline's end. ``workspace``: uint8 [at least workspace_bytes], aligned to 256 bytes; none on the CPU.

        Synchronises a stream of its own. Nothing that uses the workspace may be in flight, nor what an allocator handed its
        memory to before (``torch.cuda.synchronize()``). Drops what was captured. On an error the pipeline stays as it was.
        """
        _expect(step, "step", StepBuffers)
        _expect(layers, "layers", Sequence)
        for i, layer in enumerate(layers):
            _expect(layer, f"layers[{i}]", LayerBuffers)
        self._core.bind(step, layers, workspace)
        self._after_layer = None

    def capture(self, buckets: Iterable[int], after_layer: AfterLayer | None = None) -> None:
        """Captures one graph per bucket, in ascending order; executes nothing.

        ``after_layer(layer, rows, stream)`` is called after each layer of each bucket and enqueues the engine's kernels for
        ``rows`` rows on ``stream``, an integer (``torch.cuda.ExternalStream(stream)``). It must not allocate device memory, bind
        or capture this pipeline. What it raises ends the capture, leaves the pipeline as it was and is raised from here.
        """
        if after_layer is not None and not callable(after_layer):
            raise TypeError(f"after_layer is {after_layer!r}, must be callable or None")
        self._core.capture(buckets, after_layer)
        self._after_layer = after_layer  # with what its kernels use

    def replay(self, rows: int, stream: Stream | None = None) -> None:
        """Enqueues the smallest captured bucket that holds ``rows``. One CUDA call, the interpreter free: no synchronisation,
        allocation or reading back. ``stream`` may be None on the CPU alone, here and below.
        """
        self._core.replay(rows, stream, self._after_layer)

    def enqueue_layout(self, rows: int, stream: Stream | None = None) -> None:
        """Enqueues the decode layout of a step of at most ``rows`` rows, before its layers. Legal in capture."""
        self._core.enqueue_layout(rows, stream)

    def enqueue_layer(self, layer: int, rows: int, stream: Stream | None = None) -> None:
        """Enqueues one layer, projections to indices, for the ``rows`` of the last layout. Legal in capture."""
        self._core.enqueue_layer(layer, rows, stream)

    def status(self, stream: Stream | None = None) -> Status:
        """Reads the counters of wrong data; synchronises ``stream``. Not for the loop."""
        return Status(*self._core.status(stream))

    def reset_status(self, stream: Stream | None = None) -> None:
        """Enqueues the clearing of the counters; not for use in capture."""
        self._core.reset_status(stream)


def _expect(value: object, name: str, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} is a {type(value).__name__}, must be a {kind.__name__}")
