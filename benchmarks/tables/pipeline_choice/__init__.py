"""Whether DeepSpeed's PipelineModule and AutoEP earn a place beside Megatron-core: run here, and planned at size."""
