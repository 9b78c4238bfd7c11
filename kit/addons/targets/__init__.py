"""Files of a plan for other programs, which ``kit emit --target`` writes. Each module has its files in ``FILES``."""
