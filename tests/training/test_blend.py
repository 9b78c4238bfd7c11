"""Blends: the order is Megatron's, every engine sees it, and a run that is killed sees the rest of it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from kit.engines.protocol import IGNORE_INDEX
from kit.specs.run import BlendedSetSpec, DataSpec, LoggingSpec
from kit.training.data import blend
from kit.training.data.blend import BlendedSamples, Draws
from kit.training.data.indexed import IndexedTokens
from kit.training.data.samples import GptSamples
from kit.training.data.shuffle import permuted_index
from tests.support import tiny
from tests.training import runs
from tests.training.pairs import pair

WEIGHTS = {"web": 6.1, "code": 2.7, "maths": 1.3}


def sets(directory):
    """Name → prefix of a small set; every one has tokens of its own."""
    made = {name: tiny.documents(seed=seed)[: 40 - 10 * seed] for seed, name in enumerate(WEIGHTS)}
    return {name: str(pair(directory / name, each)) for name, each in made.items()}


def blended(paths):
    return {name: BlendedSetSpec(path=paths[name], weight=weight) for name, weight in WEIGHTS.items()}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("weights", [(6.1, 2.7, 1.3), (7, 3, 0.001), (9, 1, 1), (0.3, 0.3, 0.4)])
def test_the_order_is_that_of_megatrons_data_path(tmp_path, weights):
    """By its own builder, as pretrain_gpt.py calls it for ``--data-path w p w p w p``."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import get_blend_from_list
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    words = [word for weight, path in zip(weights, sets(tmp_path).values(), strict=True) for word in (weight, path)]
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=tiny.SEQ_LENGTH,
        blend=get_blend_from_list([str(word) for word in words]),
        split="100,0,0",
        tokenizer=NullTokenizer(tiny.VOCAB_SIZE),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        mid_level_dataset_surplus=1.0,
    )
    size = 3000
    theirs = BlendedMegatronDatasetBuilder(GPTDataset, [size, 0, 0], lambda: True, config).build()[0]
    draws = Draws(weights)
    ours = np.array([draws(position) for position in range(size)])
    assert len(theirs) >= size
    assert (ours[:, 0] == theirs.dataset_index[:size]).all()
    assert (ours[:, 1] == theirs.dataset_sample_index[:size]).all()


def test_far_positions_are_those_of_megatrons_function(monkeypatch):
    """Over several blocks, and from any of them."""
    from megatron.core.datasets import helpers_cpp

    monkeypatch.setattr(blend, "_BLOCK", 1000)
    shares = np.array([6.1, 2.7, 1.3, 1.3])
    shares = shares / shares.sum()
    index, sample = np.zeros(20_500, np.int16), np.zeros(20_500, np.int64)
    helpers_cpp.build_blending_indices(index, sample, shares / shares.sum(), 4, 20_500, False)
    draws = Draws([6.1, 2.7, 1.3, 1.3])
    for position in (20_499, 0, 12_000, 11_999, 500, 20_000):
        assert draws(position) == (index[position], sample[position])


def test_every_set_goes_through_its_own_epochs(tmp_path):
    parts = [GptSamples(IndexedTokens(path), 32, tiny.VOCAB_SIZE) for path in sets(tmp_path).values()]
    samples = BlendedSamples(parts, list(WEIGHTS.values()))
    starts, seen = [0, len(parts[0]), len(parts[0]) + len(parts[1])], ([], [], [])
    for position in range(600):
        index = samples.drawn(7, position)
        seen[samples.set_of(index)].append(index - starts[samples.set_of(index)])
    assert [*seen] == [
        [permuted_index(7, len(part), k) for k in range(len(found))] for part, found in zip(parts, seen, strict=True)
    ]
    assert [len(found) for found in seen] == pytest.approx(
        [600 * weight / sum(WEIGHTS.values()) for weight in WEIGHTS.values()], abs=0.999
    )
    mixed, masked, own = samples.micro_batches([[starts[1], starts[2] + 1], [starts[1], None], [starts[2], starts[2]]])
    assert [row.tolist() for row in mixed.labels] == [
        parts[part].micro_batches([[number]])[0].labels[0].tolist() for part, number in ((1, 0), (2, 1))
    ]
    assert (masked.labels == IGNORE_INDEX).all(dim=1).tolist() == [False, True]
    assert [each.data_set for each in (mixed, masked, own)] == [None, None, 2]
    assert [samples.length(starts[number]) for number in range(3)] == [32] * 3
    assert samples.num_tokens == 32 * len(samples) == 32 * sum(map(len, parts))


LAYOUTS = [
    {"engine": "torch"},
    {"engine": "deepspeed", "zero_stage": 1},
    {"engine": "megatron", "implementation": "local"},
]


@pytest.mark.everyday("torch")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout["engine"])
def test_every_engine_trains_on_it_and_a_resumed_run_is_the_uninterrupted_one(tmp_path, layout):
    """On two processes, bit for bit, with the curve of one process of torch, whose micro batches are of mixed sets.
    Losses of sets and norms of groups are over both ranks."""
    data = DataSpec(blend=blended(sets(tmp_path)))
    alone = runs.trained(tmp_path / "alone", tiny.plan(gradient_accumulation_steps=2), 2, data=data)
    plan = tiny.plan(dp=2, micro_batch_size=1, gradient_accumulation_steps=2, **layout)
    logging = LoggingSpec(gradient_norms_every_steps=2)
    whole, _ = runs.same_curve(tmp_path, plan, begin=alone.path, data=data, logging=logging)
    runs.resumed(alone, None)
    runs.near(runs.metrics(whole), runs.metrics(alone)[2:])
    draws = Draws(list(WEIGHTS.values()))
    for row in runs.metrics(whole):
        assert (row["grad_norms"] is None) == bool(row["step"] % 2)
        if groups := row["grad_norms"]:
            assert {"self_attn", "mlp", "embed_tokens", "lm_head"} < groups.keys()
            assert sum(norm**2 for norm in groups.values()) == pytest.approx(row["grad_norm"] ** 2, rel=1e-5)
        counts = Counter(list(WEIGHTS)[draws(4 * (row["step"] - 1) + k)[0]] for k in range(4))
        assert row["set_losses"].keys() == counts.keys()
        mean = sum(counts[name] * loss for name, loss in row["set_losses"].items()) / counts.total()
        assert mean == pytest.approx(row["loss"], rel=1e-6)


@pytest.mark.usefixtures("one_process")
def test_every_validation_set_has_its_loss(tmp_path):
    paths = sets(tmp_path)
    held_out = {"again": paths["web"], "code": paths["code"]}
    data = DataSpec(train=paths["maths"], validation=paths["web"], validation_sets=held_out)
    rundir = runs.trained(tmp_path / "run", data=data, steps=4, validation_every_steps=2)
    rows = runs.metrics(rundir)
    assert [row["validation_losses"] is None for row in rows] == [True, False, True, False]
    for row in rows[1::2]:
        losses = row["validation_losses"]
        assert list(losses) == ["again", "code"]
        assert losses["again"] == row["validation_loss"] != losses["code"]
    assert runs.summary(rundir).validation_losses == rows[-1]["validation_losses"]
    only = runs.trained(tmp_path / "only", data=DataSpec(train=paths["maths"], validation_sets=held_out), steps=1)
    assert runs.summary(only).validation_loss is None
    assert runs.metrics(only)[0]["validation_losses"].keys() == held_out.keys()
