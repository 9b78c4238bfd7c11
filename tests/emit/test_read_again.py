"""What ``kit emit --target`` writes for another trainer is, read by ``kit plan FILE``, the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.addons.configs.reading import asked_of
from kit.emit.run_directory import files_of
from kit.specs.layout import ZERO_KEYS
from tests.emit.plans import plan_of
from tests.emit.test_other_trainers import OTHERS
from tests.emit.test_rl_trainers import RL
from tests.support.files import files_in

OF_ACCELERATE = {"zero_stage", "optimizer_state_dtype"}
UNREAD = {
    "axolotl": {"offload_optimizer"},  # of FSDP2, which takes it to the host with the weights
    "llamafactory": {"autocast"} | OF_ACCELERATE,
    "ms-swift": OF_ACCELERATE,
    "verl": {"offload_optimizer", "activation_offloading", "cp_comm_type"},
    "openrlhf": {"cp_comm_type"},
}
"""Target → fields of a layout that are not compared."""
MODEL = {
    "verl": "actor_rollout_ref.model.path={0}",
    "openrlhf": "--model.model_name_or_path {0} --actor.model_name_or_path {0}",
}
"""Target → what the caller of its script adds."""
CASES = {case: each for case, each in (OTHERS | RL).items() if each[1] in UNREAD}


@pytest.mark.parametrize("case", CASES)
def test_the_file_read_again_is_the_plan(case: str, tmp_path: Path) -> None:
    name, target, fields, _ = CASES[case]
    plan = plan_of(**fields)
    own = MODEL.get(target, "").format(plan.model.name)
    files_in(
        tmp_path,
        {
            each: text.replace("REPLACE-ME", plan.model.name).replace('"$@"', own)
            for each, text in files_of(plan, [target]).items()
        },
    )
    found = asked_of(tmp_path / name, f"{plan.cluster.num_gpus}xH100").described({}).workload
    compared = vars(plan.layout).keys() - UNREAD[target] - ZERO_KEYS.keys()
    assert {key for key in compared if getattr(found.layout, key) != getattr(plan.layout, key)} == set()
    job = ("lora", "grpo", "seq_length", "precision", "global_batch_size")
    assert {key for key in job if getattr(found.job, key) != getattr(plan.job, key)} == set()
