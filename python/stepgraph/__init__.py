"""The decode step of a sparse-attention indexer as one captured CUDA graph, over the tensors of any DLPack library."""

from importlib.metadata import version

from ._arguments import AfterLayer, Geometry, LayerBuffers, Status, StepBuffers, Stream, Tensor
from ._core import CacheFormat
from ._error import Error
from ._pipeline import Pipeline

__all__ = [
    "AfterLayer",
    "CacheFormat",
    "Error",
    "Geometry",
    "LayerBuffers",
    "Pipeline",
    "Status",
    "StepBuffers",
    "Stream",
    "Tensor",
    "__version__",
]

__version__ = version("stepgraph")
