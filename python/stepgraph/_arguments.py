"""What a pipeline is told: its numbers, and the tensors of a step and of its layers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from . import _core
from ._core import CacheFormat

_default = _core.geometry_defaults()


class Tensor(Protocol):
    """Whatever exports DLPack: a tensor or array of torch, CuPy, JAX or NumPy. Its memory is used as it lies, never copied. JAX
    takes its arrays for constant and says so to nobody: hand them over as inputs alone."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


class _HasCudaStream(Protocol):
    @property
    def cuda_stream(self) -> int: ...


#: The address of a CUDA stream, or an object that has it as ``.cuda_stream`` (torch), ``__cuda_stream__()`` or ``.ptr`` (CuPy).
Stream: TypeAlias = int | _HasCudaStream | Any

#: Called with layer, rows of the bucket and the address of the stream; enqueues the engine's kernels there.
AfterLayer: TypeAlias = Callable[[int, int, int], Any]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What a step computes and how large it can get. ``Pipeline`` checks the numbers, and fills in those that are 0 and have
    another default.

    ============================  ======================================================================================
    heads                         indexer heads: 16, 32 or 64, of 128 columns each
    top_k                         positions selected per row: 1 to 4096
    max_rows                      query rows of the largest bucket: decode tokens, verify rows and padding
    max_requests                  requests of a step
    max_model_len                 tokens of the longest sequence, over all ranks
    block_table_columns           pages of the longest local sequence; width = 64 * columns
    block_table_stride            entries from one request's row to the next; 0: block_table_columns
    cache_format                  how a page is laid out
    pages                         pages of each layer's cache
    page_stride_bytes             from one page to the next, a multiple of 4; 0: the format's own bytes
    q_lora_rank, hidden_size      columns of q_c and of hidden, multiples of 8; both 0: the engine projects
    projected_columns             of the packed row; 0: key and head weights alone, 128 + heads
    key_column, weight_column     first of the 128 key columns and of the head weights in the packed row
    k_norm_eps                    of the key's LayerNorm
    dcp_world_size, _rank,        decode context parallelism: position t belongs to rank (t / interleave) % world_size
    _interleave
    ============================  ======================================================================================
    """

    heads: int = _default["heads"]
    top_k: int = _default["top_k"]
    max_rows: int
    max_requests: int
    max_model_len: int
    block_table_columns: int
    block_table_stride: int = _default["block_table_stride"]
    cache_format: CacheFormat = _default["cache_format"]
    pages: int
    page_stride_bytes: int = _default["page_stride_bytes"]
    q_lora_rank: int = _default["q_lora_rank"]
    hidden_size: int = _default["hidden_size"]
    projected_columns: int = _default["projected_columns"]
    key_column: int = _default["key_column"]
    weight_column: int = _default["weight_column"]
    k_norm_eps: float = _default["k_norm_eps"]
    dcp_world_size: int = _default["dcp_world_size"]
    dcp_rank: int = _default["dcp_rank"]
    dcp_interleave: int = _default["dcp_interleave"]

    @property
    def width(self) -> int:
        """Local positions that a request can have."""
        return 64 * self.block_table_columns


@dataclass(frozen=True, kw_only=True)
class StepBuffers:
    """Tensors that all layers share. The engine updates their contents between replays.

    ============  ===========================================  ================================================================
    seq_lens      int32 [max_requests]                         tokens, the step's own included
    query_lens    int32 [max_requests]                         rows of each request; 0 allowed
    block_table   int32 [max_requests, block_table_columns]    pages of each request; rows block_table_stride apart
    num_requests  int32 [1]                                    None: all max_requests are live
    slots         int64 [max_rows]                             page * 64 + offset, negative: not stored; None: derived
    ============  ===========================================  ================================================================
    """

    seq_lens: Tensor
    query_lens: Tensor
    block_table: Tensor
    num_requests: Tensor | None = None
    slots: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class LayerBuffers:
    """Tensors of one layer. The step's keys are inserted into ``cache`` before they are scored: a row sees its own key.

    Either q_c, hidden, wq_b and w_kv, which are projected here, or the engine's own iq and projected. Where an array library
    has no bfloat16 (NumPy), its bits as uint16 will do. Outputs that are None are not made.

    ==============  =========================================  ================================================================
    k_norm_weight   float32 [128]
    k_norm_bias     float32 [128]
    cache           uint8 [pages, page_stride_bytes]           or a view of that much of each page that holds its index section
    indices         out, int32 [max_rows, top_k]               local positions, ascending, -1 behind them

    q_c             bfloat16 [max_rows, q_lora_rank]
    hidden          bfloat16 [max_rows, hidden_size]
    wq_b            bfloat16 [heads * 128, q_lora_rank]
    w_kv            bfloat16 [projected_columns, hidden_size]

    iq              bfloat16 [max_rows, heads * 128]
    projected       bfloat16 [max_rows, projected_columns]

    counts          out, int32 [max_rows]                      winners of each row
    physical_slots  out, int64 [max_rows, top_k]               the winners' slots, -1 for padding or an invalid block
    winner_logits   out, float32 [max_rows, top_k]             -inf behind the winners
    logits          out, float32 [max_rows, width]             -inf from a row's bound on; for tests, slow
    ==============  =========================================  ================================================================
    """

    k_norm_weight: Tensor
    k_norm_bias: Tensor
    cache: Tensor
    indices: Tensor

    q_c: Tensor | None = None
    hidden: Tensor | None = None
    wq_b: Tensor | None = None
    w_kv: Tensor | None = None

    iq: Tensor | None = None
    projected: Tensor | None = None

    counts: Tensor | None = None
    physical_slots: Tensor | None = None
    winner_logits: Tensor | None = None
    logits: Tensor | None = None


class Status(NamedTuple):
    """Counters of wrong data that was skipped, since bind or the last reset, modulo 2^32. All are 0 where nothing was wrong.

    ==============  ===========================================================================
    invalid_slots   slots at or past the cache's end, and derived ones outside table or cache
    invalid_blocks  block table entries outside the cache: once per request, column and layer
    clamped_bounds  rows whose bound was cut to the block table's width
    dropped_rows    rows of the query lengths beyond the bucket
    ==============  ===========================================================================
    """

    invalid_slots: int
    invalid_blocks: int
    clamped_bounds: int
    dropped_rows: int
