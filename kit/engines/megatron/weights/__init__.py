"""Maps Megatron's parameters to Hugging Face's tensors: one declarative table per family, used in both directions.

Every rule only rearranges elements, so the same table serves for weights, gradients and Adam's moments.

Its rooms, in the order in which data walks:

    mapping, sharding             entries of a table, and how ranks split them
    families                      which table a model has
    llama, gemma, gpt2, gpt_neox, gpt_oss, olmo, deepseek, minimax_m2, qwen2_moe
                                  the tables
    adapters                      those of LoRA
    random                        weights that no layout changes
"""

from kit.engines.megatron.weights.families import weight_map
from kit.engines.megatron.weights.mapping import ParamMapping, mapped_params

__all__ = ["ParamMapping", "mapped_params", "weight_map"]
