"""What a workload is made of: parameters, pipeline stages, FLOPs, adapters."""
