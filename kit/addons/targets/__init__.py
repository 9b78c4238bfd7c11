"""Files of a plan for other programs, which ``kit emit --target`` writes; that of ``pretrain_gpt`` is in every run
directory of Megatron. Each module has its files in ``FILES``."""
