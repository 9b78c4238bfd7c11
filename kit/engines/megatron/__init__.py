"""megatron-core with local layers, and Hugging Face weights in and out."""

import warnings

# The implementation is local by choice: what megatron-core falls back to without them is never used, or meant.
for _message in ("Apex is not installed", "Transformer Engine and Apex are not installed"):
    warnings.filterwarnings("ignore", message=_message, category=UserWarning)
# Attention is computed again where a plan says so, which without Transformer Engine is not fused there.
warnings.filterwarnings("ignore", message="If you are using transformer_engine as the", category=UserWarning)
# With fp32 parameters the distributed optimizer steps views of them, whose ``grad`` it sets itself.
warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf", category=UserWarning)
