"""Graphs and models as ONNX files: tracing, the rules of operators, free extents, the file."""

from .export import export
from .table import Exportable, exportable
