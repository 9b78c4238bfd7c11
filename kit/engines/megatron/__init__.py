"""The Megatron engine: megatron-core's model and optimizers, which read and write Hugging Face weights.

Its rooms, in the order in which data walks:

    versions, cpu                 patches, on every device and without CUDA
    model                         layers without Transformer Engine
    weights, resharding           Hugging Face's tensors ↔ Megatron's, on any layout
    adapters, chunks, prediction_heads, routing
                                  LoRA, the part of a rank, multi-token prediction, balancing
    optimizer, muon               megatron-core's optimizers
    microbatches, engine          steps
"""

import warnings

# kit uses its own norms, attention and optimizer with implementation=local, so these fallbacks do not matter.
for _message in ("Apex is not installed", "Transformer Engine and Apex are not installed"):
    warnings.filterwarnings("ignore", message=_message, category=UserWarning)
# megatron-core advises against recompute of Transformer Engine's fused attention. The plan decides about recompute.
warnings.filterwarnings("ignore", message="If you are using transformer_engine as the", category=UserWarning)
# With fp32 parameters the distributed optimizer steps views of the parameters, and sets the ``grad`` of these views.
warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf", category=UserWarning)
