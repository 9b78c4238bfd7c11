"""Pure functions from model, cluster, job and layout to memory, time and money."""
