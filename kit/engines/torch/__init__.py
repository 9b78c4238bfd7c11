"""The torch engine: one device, DDP or FSDP2, with or without tensor parallelism."""
