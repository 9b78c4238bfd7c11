"""fp8 GEMMs of linear layers, by torchao: dynamic scaling, with one scale per tensor.

Input and weight are e4m3 (4 significant bits); in backward, the gradient of the output is e5m2 (3 significant bits). A
scale comes from the tensor's current largest value (torchao/float8, "tensorwise", dynamic). In torchao's measurements
this is the fastest recipe: Llama-3-8B on 8 H100, with weights gathered in 8 bits, trains 1.25 times as fast as in bf16,
and 1.12 times with scales per row (pytorch/torchtitan, 7a04053). kit also configures Transformer Engine so on Hopper.
Weights, gradients, moments and all other operators are as in precision=bf16.

FSDP2 gathers weights in bf16. torchao could gather them in 8 bits, but every weight would become a tensor subclass,
which the optimizer and checkpoints would have to support.
"""

from __future__ import annotations

import dataclasses

import torch

from kit.engines.huggingface.models import transformer_layers
from kit.errors import EngineError
from kit.extras import install
from kit.specs.layout import FP8_MULTIPLE


def convert(model: torch.nn.Module, *, emulated: bool, ragged: bool = False) -> list[str]:
    """Convert the linear layers of transformer blocks to fp8, in place; returns their names.

    Not converted: head and embedding, which are outside of blocks; experts and routers, which are not linear layers in
    transformers; layers with sizes that tensor cores do not support. Parameters keep their names and identity.
    ``emulated``: round operands to fp8 but multiply in fp32, for CPUs. ``ragged``: the number of tokens is not always a
    multiple of ``FP8_MULTIPLE``; pads the GEMM that sums over tokens.

    Raises EngineError if torchao is missing, or if no layer is converted.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise EngineError(f"precision=fp8 on engine=torch needs torchao ({error}); {install('torchao')}") from None
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
    """Cast the input under CPU autocast: torchao does so under CUDA's autocast only (float8_linear.py,
    Float8Linear.forward)."""
    if not torch.is_autocast_enabled("cpu"):
        return arguments
    return (arguments[0].to(torch.get_autocast_dtype("cpu")), *arguments[1:])
