"""Outputs of a run's metrics.

Its rooms, in the order in which data walks:

    run_logger  all outputs in one object
    metrics     ``metrics.jsonl``, ``events.jsonl``
    terminal    a live line, or plain lines for files and pipes
    trackers    TensorBoard, W&B, MLflow, Trackio
    prometheus  a port that is asked
"""
