"""Plan → files, one module a target; pure text, written by ``run_directory`` alone."""
