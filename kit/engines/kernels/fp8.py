"""Products of linear layers in 8 bits, by torchao: operands are scaled tensor by tensor, rounded, and multiplied so.

Forward takes input and weight in e4m3 (4 significant bits), backward the gradient of the output in e5m2 (3), each with
one scale a tensor from its own largest value at that moment (torchao/float8, "tensorwise", dynamic): by torchao's
measurements the fastest of its recipes (Llama-3-8B on 8 H100, weights gathered in 8 bits: 1.25 times bf16's tokens,
with scales by rows 1.12; pytorch/torchtitan, 7a04053), and what kit asks of Transformer Engine on Hopper too. Weights,
gradients, moments and everything between the products stay what they are in bf16.

FSDP2 gathers weights in bf16. torchao could gather them in 8 bits, but for that every weight becomes a tensor subclass
inside of the sharded tensor, which optimizer and checkpoints would have to know: it is left off.
"""

from __future__ import annotations

import dataclasses

import torch

from kit.engines.huggingface.models import transformer_layers
from kit.errors import EngineError
from kit.specs.layout import FP8_MULTIPLE


def convert(model: torch.nn.Module, *, emulated: bool, ragged: bool = False) -> list[str]:
    """Linear layers of the blocks compute in 8 bits from now on, in place; returns their names.

    Not the head and the embedding, which lie outside of blocks; not experts and routers, which are no linear layers in
    transformers; nor one whose sizes tensor cores do not take. Parameters stay the same objects under the same names.
    ``emulated``: operands are rounded the same, and multiplied in fp32: for processors. ``ragged``: numbers of tokens
    are no multiple of ``FP8_MULTIPLE``, and are padded for the product that sums over them.
    Raises EngineError where torchao is missing or no layer is converted.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise EngineError(
            f"precision=fp8 on engine=torch needs torchao ({error}); pip install 'kit[torchao]'"
        ) from None
    inside = {id(module) for layer in transformer_layers(model) for module in layer.modules()}
    names: list[str] = []

    def chosen(module: torch.nn.Module, name: str) -> bool:
        if id(module) not in inside or not isinstance(module, torch.nn.Linear):
            return False
        if module.in_features % FP8_MULTIPLE or module.out_features % FP8_MULTIPLE:
            return False
        names.append(name)
        return True

    tensorwise = Float8LinearConfig.from_recipe_name("tensorwise")
    config = dataclasses.replace(tensorwise, emulate=emulated, pad_inner_dim=ragged)
    convert_to_float8_training(model, module_filter_fn=chosen, config=config)
    if not names:
        raise EngineError(
            f"precision=fp8 with {type(model).__name__}, none of whose blocks has a linear layer with sizes that are "
            f"multiples of {FP8_MULTIPLE}; use bf16"
        )
    if emulated:
        for name in names:
            model.get_submodule(name).register_forward_pre_hook(_cast_as_on_a_gpu)
    return names


def _cast_as_on_a_gpu(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """torchao casts its input under CUDA's autocast and no other (float8_linear.py, Float8Linear.forward)."""
    if not torch.is_autocast_enabled("cpu"):
        return arguments
    return (arguments[0].to(torch.get_autocast_dtype("cpu")), *arguments[1:])
