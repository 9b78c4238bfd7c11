"""People's own training scripts under the configurations that kit writes, really launched."""
