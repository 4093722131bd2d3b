"""Trained models as files for other programs, each compared with the model before it is kept."""

from segtrain.export.formats import ExportModel
from segtrain.export.write import Comparison, export_graph, export_weights

__all__ = ["Comparison", "ExportModel", "export_graph", "export_weights"]
