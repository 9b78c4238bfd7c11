"""Names → specs of models, GPUs and clusters, from data files in which every row names its source.

Its rooms, in the order in which data walks:

    rows        the data files
    models      names and directories of models
    clusters    GPUs, nodes, and text such as ``8xH100``
"""

from kit.specs.catalog.clusters import (
    cheapest_node_with,
    cluster_called,
    gpu_names,
    load_gpu,
    node_names,
    parse_cluster,
)
from kit.specs.catalog.models import described_names, load_model, model_called, model_names

__all__ = [
    "cheapest_node_with",
    "cluster_called",
    "described_names",
    "gpu_names",
    "load_gpu",
    "load_model",
    "model_called",
    "model_names",
    "node_names",
    "parse_cluster",
]
