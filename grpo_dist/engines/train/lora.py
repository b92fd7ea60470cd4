"""LoRA (arXiv 2106.09685) by peft: small trained factors beside frozen weights, W + scaling * B A.

The factors are added before the model is sharded, and drawn or read from an adapter after it. Weights for rollout
engines and exported folders have them merged, tensor by tensor, so both need not know of LoRA; hf_export.py writes
them apart. The reference is the same model with the factors switched off, so there are no reference workers.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from grpo_dist.assets import POLICY_SECTION, expanded
from grpo_dist.assets.model_folder import ADAPTER_WEIGHTS, PREFIX, A, B, read_adapter_folder, some
from grpo_dist.config.schema_roles import ALL_LINEAR, LORA_RANK, LoraSection
from grpo_dist.engines.train.router_replay import routers_of
from grpo_dist.engines.train.sharded_tensors import free_gathered, gathered_on, replace_tensor, whole
from grpo_dist.errors import ConfigError, DataError

ADAPTER = "default"  # peft's name of the first adapter


def add_lora(model: Any, lora: LoraSection, section: str = POLICY_SECTION, dtype: torch.dtype = torch.float32) -> None:
    """Freeze a model without memory and put trainable factors beside its target modules.

    `draw_factors` or `load_factors` fills them. What is no linear layer, as experts and their router, stays frozen.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(
            f"{section}.{LORA_RANK}={lora.factors['r']}: needs peft ({error}); pip install 'peft>=0.18,<1' (extra lora)"
        ) from None
    setting = f"{section}.target_modules={lora.targets}"
    if lora.lora_adapter_path is not None:
        setting = f"{section}.lora_adapter_path={lora.lora_adapter_path}"
        lora = lora.replaced(target_modules=tuple(read_adapter_folder(lora.lora_adapter_path, setting).layers))
    names = _target_names(model, lora, setting, section)
    _check_not_shared(model, names, setting)
    config = LoraConfig(**lora.factors, target_modules=names, bias="none")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fan_in_fan_out")  # peft finds it by itself for each module, and says so
            inject_adapter_in_model(config, model, ADAPTER, low_cpu_mem_usage=True)
    except ValueError as error:
        raise ConfigError(f"{setting}: {error}") from None
    layers = lora_layers(model)
    if layers.keys() != set(names) or any(hasattr(layer, "parameter_name") for layer in layers.values()):
        raise ConfigError(
            f"{setting}: the experts of a layer and their router take no factors, and peft "
            f"takes some of these names for theirs; name the layers of the attention, or train all with {LORA_RANK}=0"
        )
    for name, layer in layers.items():
        if ADAPTER not in layer.lora_A or not _is_linear(layer.get_base_layer()):
            kind = type(layer.get_base_layer()).__name__
            raise ConfigError(f"{setting}: {name} is of class {kind}, and LoRA is for linear layers")
        for factor in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]):
            factor.to(dtype)
    # the first layer's input is then of the kind of all others', and its compiled graphs are theirs
    model.get_input_embeddings().register_forward_hook(
        lambda _module, _args, output: output.requires_grad_() if torch.is_grad_enabled() else None
    )


def _target_names(model: Any, lora: LoraSection, setting: str, section: str) -> list[str]:
    """The modules meant, by whole names: peft would make more of "all-linear", and of names of its older code."""
    targets, modules = lora.targets, dict(model.named_modules())
    if targets == ALL_LINEAR:
        head = model.get_output_embeddings()
        routers = tuple(f"{name}." for name in routers_of(model))
        linear = [name for name, module in modules.items() if _is_linear(module) and module is not head]
        candidates = [name for name in linear if not f"{name}.".startswith(routers)]
    else:
        candidates = [name for name in modules if _is_called(name, targets)]
        if missing := [target for target in targets if not any(_is_called(name, (target,)) for name in candidates)]:
            raise ConfigError(
                f"{setting}: this model has no module that is called {some(missing)}; "
                "experts that a layer holds as one tensor take no factors. Name others, or all-linear"
            )
    excluded = lora.exclude_modules or ()
    names = [name for name in candidates if not _is_called(name, excluded)]
    if not names:
        raise ConfigError(f"{section}.exclude_modules={excluded}: leaves out all of {targets}; name fewer")
    return names


def _is_linear(module: Any) -> bool:
    """Tell linear layers from routers, which may be of a class of theirs and choose experts as well."""
    return type(module).forward in (nn.Linear.forward, Conv1D.forward)


def _check_not_shared(model: nn.Module, names: list[str], setting: str) -> None:
    """Check that no target's weight is another module's too, as that of an output layer which is tied to the embedding:
    its factors would change the other module as well.
    """
    holders: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(weight), []).append(name)
    for name in names:
        module = model.get_submodule(name)
        both = holders.get(id(getattr(module, "weight", None)), [])
        if len(both) < 2 or isinstance(module, nn.Embedding):  # which is no linear layer, as is said later
            continue
        other = next(other_name for other_name in both if other_name != f"{name}.weight").removesuffix(".weight")
        raise ConfigError(
            f"{setting}: {name} shares its weight with {other} (tie_word_embeddings), so engines and exported models "
            f"would lack what its factors learn; take targets, or an adapter, without {name}"
        )


def _is_called(name: str, ends: Iterable[str]) -> bool:
    return any(f".{name}".endswith(f".{end}") for end in ends)


@torch.no_grad()
def draw_factors(model: nn.Module) -> None:
    """Draw LoRA's factors of a sharded model: A as peft draws it, B is 0, so nothing changes yet. Collective.

    What is drawn depends on torch's random state on rank 0 alone, and is what peft itself would draw then: each factor,
    whole for a moment, has its own start first, which is dropped.
    """
    for name, layer in lora_layers(model).items():
        a, b = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
        first, second = (nn.Linear(factor.in_features, factor.out_features, bias=False) for factor in (a, b))
        nn.init.kaiming_uniform_(first.weight, a=math.sqrt(5))
        nn.init.zeros_(second.weight)
        for factor, old, drawn in (("lora_A", a.weight, first.weight), ("lora_B", b.weight, second.weight)):
            value = drawn.detach().to(old.device_mesh.device_type, old.dtype)
            replace_tensor(model, f"{name}.{factor}.{ADAPTER}.weight", value)


@torch.no_grad()
def load_factors(model: nn.Module, lora: LoraSection, section: str) -> None:
    """Fill LoRA's factors of a sharded model from the adapter that training goes on from. Collective."""
    assert lora.lora_adapter_path is not None
    setting = f"{section}.lora_adapter_path={lora.lora_adapter_path}"
    with safe_open(expanded(lora.lora_adapter_path) / ADAPTER_WEIGHTS, framework="pt", backend="pread") as file:
        for name, parameter in factors(model):
            old, value = cast(DTensor, model.get_parameter(parameter)), file.get_tensor(name)
            if value.shape != old.shape:
                raise DataError(
                    f"{setting}: {name} is of shape {tuple(value.shape)}, and of this model {tuple(old.shape)}; the "
                    "adapter belongs to another base model"
                )
            if not torch.isfinite(value).all():
                raise DataError(f"{setting}: nan or infinity in {name}; the file is damaged")
            replace_tensor(model, parameter, value.to(old.device_mesh.device_type, old.dtype))


def factors(model: nn.Module) -> Iterator[tuple[str, str]]:
    """(name of a factor as adapters in peft's form have it, name of the parameter in the model)."""
    for name in lora_layers(model):
        for end, factor in ((A, "lora_A"), (B, "lora_B")):
            yield f"{PREFIX}{name_in_whole(model, name)}{end}", f"{name}.{factor}.{ADAPTER}.weight"


def name_in_whole(model: Any, name: str) -> str:
    """The name of a layer in the model that a language part is a part of."""
    inner = f"{model.base_model_prefix}."
    return f"{model.place}.{name.removeprefix(inner)}" if model.place and name.startswith(inner) else name


@contextlib.contextmanager
def lora_hidden(model: nn.Module) -> Iterator[None]:
    """Within the block the layers with factors are replaced by the plain ones, under their plain names."""
    layers = lora_layers(model)
    for name, layer in layers.items():
        model.set_submodule(name, layer.get_base_layer())
    try:
        yield
    finally:
        for name, layer in layers.items():
            model.set_submodule(name, layer)


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """The modules with factors, by name; {} without LoRA."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within the block the factors are off: the model is the reference.

    peft's `enable_adapters` would also set `requires_grad` of the factors: of the gathered ones where FSDP2 has those
    in place at the end of the block, so that the sharded ones, which the next pass is made of, would stay frozen.
    """
    layers = lora_layers(model).values()
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def full_parameters(
    model: Any, dtype: torch.dtype, device: str = "cpu", *, head_dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, whole tensor on `device` in `dtype`) one at a time; a tied tensor comes once.

    LoRA's factors are merged; a `head_dtype` is the output layer's. Collective: all ranks iterate together.
    """
    free_gathered(model)  # or these would be copies in the compute type
    layers, head, on = lora_layers(model), model.get_output_embeddings(), gathered_on(model)
    of_head = set() if head is None else {id(parameter) for parameter in head.parameters()}
    for name, parameter, plain in merged(model):
        wanted = head_dtype if head_dtype is not None and id(parameter) in of_head else dtype
        owner, base, leaf = name.rpartition(".base_layer.")
        if base and leaf == "weight":
            layer = layers[owner]
            factors = [
                whole(factor[ADAPTER].weight.detach(), on, torch.float32) for factor in (layer.lora_B, layer.lora_A)
            ]
            change = layer.scaling[ADAPTER] * (factors[0] @ factors[1])
            if layer.fan_in_fan_out:  # Conv1D (GPT-2) holds its weight as (in, out), transposed
                change = change.t()
            yield plain, (whole(parameter.detach(), on, torch.float32) + change).to(wanted).to(device)
        else:
            yield plain, whole(parameter.detach(), on, wanted).to(device)


def full_factors(model: nn.Module, dtype: torch.dtype, device: str = "cpu") -> Iterator[tuple[str, Tensor]]:
    """As `full_parameters`, LoRA's factors alone, under the names of adapters in peft's form."""
    free_gathered(model)
    on = gathered_on(model)
    for name, parameter in factors(model):
        yield name, whole(model.get_parameter(parameter).detach(), on, dtype).to(device)


def merged(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, str]]:
    """Parameters but for LoRA's factors: name, parameter, name before LoRA, which `full_parameters` yields."""
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            yield name, parameter, name.replace(".base_layer.", ".")
