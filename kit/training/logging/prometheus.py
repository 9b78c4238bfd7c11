"""Metrics for Prometheus on a port of the main rank. Off by default. Listens on loopback unless an address is set."""

from __future__ import annotations

import importlib.util
from typing import Any

from kit.errors import EngineError
from kit.extras import install
from kit.planner.plan import Plan
from kit.training.logging.metrics import RunOutput, StepMetrics

GAUGES = {
    "kit_step": ("step", "Optimizer steps done"),
    "kit_loss": ("loss", "Training loss of the last step, nats per token"),
    "kit_set_loss": ("set_losses", "Training loss of each set of a blend, nats per token"),
    "kit_validation_loss": ("validation_loss", "Held-out loss where it was last measured, nats per token"),
    "kit_validation_set_loss": ("validation_losses", "The same, of each set of run.data.validation_sets"),
    "kit_gradient_norm": ("grad_norm", "Gradient norm before clipping"),
    "kit_group_gradient_norm": ("grad_norms", "The same, of each group of parameters where it was asked for"),
    "kit_learning_rate": ("learning_rate", "Learning rate"),
    "kit_loss_scale": ("loss_scale", "Loss scale of fp16"),
    "kit_samples_seen": ("samples_seen", "Sequences seen"),
    "kit_step_seconds": ("step_time_s", "Data, forward, backward and optimizer of the last step"),
    "kit_data_seconds": ("data_s", "Waiting for data, slowest rank"),
    "kit_forward_backward_seconds": ("forward_backward_s", "Forward and backward"),
    "kit_optimizer_seconds": ("optimizer_s", "Optimizer step"),
    "kit_loop_seconds": ("loop_s", "The training loop's own time between steps"),
    "kit_slowest_rank": ("slowest_rank", "Rank whose own work takes longest"),
    "kit_slowest_rank_ratio": ("slowest_rank_ratio", "Its time over the median of the others"),
    "kit_checkpoint_stall_seconds": ("checkpoint_s", "Training stood still for a checkpoint"),
    "kit_remote_step": ("remote_step", "Newest step whose checkpoint is complete in run.checkpoint.remote"),
    "kit_tokens_per_second": ("tokens_per_s", "Over all GPUs, without padding"),
    "kit_tokens_per_second_per_gpu": ("tokens_per_s_per_gpu", "Per GPU, without padding"),
    "kit_padding_ratio": ("padding_fraction", "Part of the positions that is padding"),
    "kit_mfu_ratio": ("mfu", "Model FLOPs utilisation, causal attention"),
    "kit_memory_peak_gib": ("memory_gib", "Peak of the fullest GPU"),
    "kit_mtp_loss": ("mtp_loss", "Loss of the heads of multi-token prediction"),
    "kit_expert_load_max_ratio": ("expert_load_max", "Tokens of the fullest expert over the mean, worst layer"),
    "kit_expert_load_entropy_ratio": ("expert_load_entropy", "Entropy of expert loads, 1 is even, worst layer"),
    "kit_dead_experts": ("dead_experts", "Experts without a token in the last step"),
    "kit_dropped_tokens_ratio": ("dropped_tokens", "Part of the tokens over an expert's capacity"),
    "kit_router_aux_loss": ("router_aux_loss", "Auxiliary loss without its coefficient, 1 is even"),
    "kit_router_z_loss": ("router_z_loss", "z-loss of routers without its coefficient"),
    "kit_expert_bias_range": ("expert_bias_range", "Largest less smallest expert bias, worst layer"),
    "kit_eta_seconds": ("eta_s", "Until the last step"),
}
"""Exported name → (field of a step's metrics, help)."""
LABELS = {"kit_set_loss": "set", "kit_validation_set_loss": "set", "kit_group_gradient_norm": "group"}
"""Label of the gauges whose field is a mapping."""
PREDICTED = {
    "kit_predicted_memory_peak_gib": "Peak of the fullest GPU as planned",
    "kit_predicted_step_seconds": "Step time as planned",
    "kit_total_steps": "Steps of the whole run",
}
EVENTS = "kit_events"
"""Counter, exported as kit_events_total: steps with an event, by kind."""


class Prometheus(RunOutput):
    """One HTTP endpoint. Raises EngineError if prometheus_client is missing, or if the port is in use."""

    def __init__(self, port: int, address: str, plan: Plan, total_steps: int) -> None:
        if importlib.util.find_spec("prometheus_client") is None:
            raise EngineError(
                f"run.logging.prometheus_port needs prometheus_client; {install('tracking')}, or use null"
            )
        import prometheus_client as client

        self.registry = registry = client.CollectorRegistry()
        labels = {"model": plan.model.name, "engine": plan.layout.engine}
        self._labels = list(labels.values())
        self._gauges = {
            name: client.Gauge(name, text, [*labels, *filter(None, [LABELS.get(name)])], registry=registry)
            for name, (_, text) in GAUGES.items()
        }
        self._events = client.Counter(EVENTS, "Steps with an event", [*labels, "event"], registry=registry)
        values = (plan.predicted.peak_gib, plan.predicted.step_time_s, total_steps)
        for (name, text), value in zip(PREDICTED.items(), values, strict=True):
            client.Gauge(name, text, list(labels), registry=registry).labels(*self._labels).set(value)
        try:
            self._server, self._thread = client.start_http_server(port, address, registry)
        except OSError as error:
            raise EngineError(
                f"run.logging.prometheus_port={port} on {address} cannot be opened ({error.strerror}); choose another"
            ) from None

    def log_step(self, metrics: StepMetrics, due: bool = True) -> None:
        """Set the gauges of all fields that are not None."""
        for name, (field, _) in GAUGES.items():
            value: Any = getattr(metrics, field)
            for label, number in (value if name in LABELS else {None: value}).items() if value is not None else ():
                self._gauges[name].labels(*self._labels, *filter(None, [label])).set(number)
        if metrics.event is not None:
            self._events.labels(*self._labels, metrics.event.split(":")[0]).inc()

    def log_checkpoint(self, step: int, stall_s: float) -> None:
        """Set the gauge of the checkpoint's time. It keeps its value until the next checkpoint."""
        self._gauges["kit_checkpoint_stall_seconds"].labels(*self._labels).set(stall_s)

    def close(self) -> None:
        """Stop the server and release the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
