"""Plan → text of files, one module per target. Only ``run_directory`` writes files."""
