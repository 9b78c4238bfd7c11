"""Upload of a converted model to the Hugging Face Hub, with a model card: when asked, with the user's own token."""

from __future__ import annotations

from pathlib import Path

from kit.emit.markdown import plain
from kit.emit.run_directory import RunDirectory
from kit.errors import CheckpointError
from kit.planner.describe import describe
from kit.training.checkpoint.exchange import ExchangeCheckpoint, is_exchange
from kit.training.checkpoint.to_huggingface import CHAT_TEMPLATE
from kit.training.data.tokenizers import one_line
from kit.training.logging.metrics import logged_rows


def refuse_early(repository: str) -> None:
    """Raises CheckpointError if nothing could be uploaded to ``repository`` (org/name), before hours of conversion."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise CheckpointError(f"--push {repository} is no name of a model: {one_line(error)}; use org/name") from error
    if "/" not in repository:
        raise CheckpointError(f"--push {repository} has no owner; use org/name")
    if constants.HF_HUB_OFFLINE:
        raise CheckpointError(f"--push {repository} with HF_HUB_OFFLINE=1, which forbids connections; unset it")
    if get_token() is None:
        raise CheckpointError(f"--push {repository} needs your own token: run hf auth login, or set HF_TOKEN")


def push(directory: Path, repository: str, source: Path) -> str:
    """Write the card of the model in ``directory``, unless it has one, and upload all its files to the model
    ``repository``, which is made private if it is new. ``source``: what the model was converted from. Returns the
    address. Raises CheckpointError; ``directory`` then stays as it is."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined] # of its client, also without an answer

    if not (directory / "README.md").exists():
        (directory / "README.md").write_text(card(repository, source), encoding="utf-8")
    api = HfApi()
    try:
        url = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=repository, folder_path=directory, commit_message=f"Upload of {repository.partition('/')[2]}"
        )
    except (HTTPError, OSError) as error:
        raise CheckpointError(
            f"{repository} is not complete on the Hub ({one_line(error)}); {directory} is: "
            f"hf upload {repository} {directory} goes on"
        ) from error
    return str(url)


def card(repository: str, source: Path) -> str:
    """The model card: what kit knows of the run that ``source`` is a checkpoint of."""
    title = f"# {repository.partition('/')[2]}"
    exchange = ExchangeCheckpoint(source) if is_exchange(source) else None
    adapters = exchange is not None and exchange.lora is not None
    head = ["---", f"library_name: {'peft' if adapters else 'transformers'}", "---", "", title, ""]
    rows: dict[str, str] = {}
    if (run := _run_of(source)) is not None:
        rows = _of_run(run)
    if exchange is not None:
        counters = exchange.counters
        rows |= {} if exchange.chat_template is None else {"chat template": f"[{CHAT_TEMPLATE}]({CHAT_TEMPLATE})"}
        rows |= {"steps": f"{counters.step:,}", "tokens seen": f"{counters.tokens_seen:,}"}
        rows |= _losses(run, counters.step) if run is not None else {}
    lines = [f"| {key} | {value} |" for key, value in rows.items()]
    table = ["| | |", "|---|---|", *lines, ""] if lines else ["No run was beside this checkpoint.", ""]
    return "\n".join([*head, *table, "No license is stated; add yours, and that of the model it started from.", ""])


def _run_of(source: Path) -> Path | None:
    """The run directory that holds ``source``: RUN/checkpoints/NAME, or RUN itself."""
    places = (source, *list(source.resolve().parents)[:2])
    return next((place for place in places if (place / "plan.yaml").is_file()), None)


def _of_run(path: Path) -> dict[str, str]:
    directory = RunDirectory.open(path)
    plan, job, run = directory.plan, directory.plan.job, directory.run
    started = {} if run.model_path is None else {"started from": plain(Path(run.model_path).name)}
    return {
        "model": plain(plan.model.name),
        **started,
        "objective": job.objective,
        "data": plain(
            ", ".join(Path(path).name for path in run.data.training_paths)
        ),  # without the directories of somebody's machine
        "sequence length": f"{job.seq_length:,}",
        "global batch": f"{job.global_batch_size:,} sequences",
        "precision": job.precision,
        "optimizer": f"{job.optimizer.name}, learning rate {job.learning_rate:g}",
        "layout": f"{plan.cluster.num_gpus} x {plain(plan.cluster.gpu.name)}: {describe(plan.layout)}",
    }


def _losses(run: Path, step: int) -> dict[str, str]:
    """The last losses up to ``step``; empty without a log."""
    try:
        rows = [row for _, row in logged_rows(run / "metrics.jsonl") if row is not None and row["step"] <= step]
    except (OSError, ValueError):
        return {}
    found = {}
    for name, key in (("loss", "loss"), ("validation loss", "validation_loss")):
        values = [row[key] for row in rows if isinstance(row.get(key), float)]
        if values:
            found[name] = f"{values[-1]:.4f} nats per token"
    return found
