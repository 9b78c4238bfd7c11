"""Maps Megatron's parameters to Hugging Face's tensors: one declarative table per family, used in both directions.

Every rule only rearranges elements, so the same table serves for weights, gradients and Adam's moments.
"""

from kit.engines.megatron.weights.families import weight_map
from kit.engines.megatron.weights.mapping import MappedParam, ParamMapping, mapped_params

__all__ = ["MappedParam", "ParamMapping", "mapped_params", "weight_map"]
