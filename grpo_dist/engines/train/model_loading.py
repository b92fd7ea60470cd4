"""A model read from safetensors straight into the shards of its ranks: a causal LM, or a backbone with a linear head.

No process ever holds the whole model. It is built on torch's meta device, where tensors have shapes but no memory; the
caller changes and shards it; then transformers' own loader fills it: of each tensor it reads the rows that this rank
holds, under the model's present names, and stacks experts that the model holds as one tensor. Before, the same loader
runs on the files' headers, to find tensors that are missing, superfluous or of another shape.

Some conversions of transformers cut or join tensors along their rows, and are wrong if they see some of the rows only.
For models that need one, rank 0 loads the whole model and distributes it tensor by tensor.

`as_in_files` undoes the conversions: exported folders have, and vLLM loads, the names and the form of the files. Of a
model with a vision part the language part is trained, and what the files have besides goes into exports as it is.

Models with a linear head (reward models, process reward models, critics) are saved as `...ForSequenceClassification`,
which computes the head at every token and keeps the last one, or as `...ForTokenClassification`, which keeps all. Here
every one is the latter: its outputs at all tokens are a tensor (B, L, num_labels), small enough to keep, and a caller
picks the tokens that it means.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForSequenceClassification
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.initialization import meta_device_safe_creation_ops
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import LoadStateDictConfig, LoadStateDictInfo
from transformers.utils import logging as library

from grpo_dist.assets.model_folder import EMBEDDINGS, read_header, some, weight_files
from grpo_dist.config.schema_roles import LORA_RANK
from grpo_dist.engines.settings import ModelSettings
from grpo_dist.engines.train.attention import OWN, attention_implementation
from grpo_dist.engines.train.lora import merged
from grpo_dist.engines.train.sharded_tensors import local_shard, replace_tensor
from grpo_dist.errors import ConfigError, DataError

HEAD = "score"  # the linear layer of a classifier
OUTPUT_LAYER = "lm_head"  # of a causal LM
VISION = "vision"  # the part of a causal LM that trains with it
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Conversions that rank by rank give each rank its rows of the result: the first stacks tensors, and each rank leaves
# out those that it does not hold; the second joins them along another axis than the rows.
STACK, JOIN = "MergeModulelist", "Concatenate"
_EMBEDDING = ".embed_tokens.weight"
_BACKBONES = {"qwen2_5_vl_text", "qwen3_vl_text"}

logger = logging.getLogger(__name__)


@dataclass
class UnloadedModel:
    """A model without memory, on the meta device in eval mode, and where its weights are.

    Attributes:
        model: with `carried`, the tensors of the files that it does not have, such as those of a vision part, and
            `place`, where its layers are in the whole model: "" where it is the whole, or `model.language_model`.
        conversions: transformers' renamings and conversions that these files need.
        whole_because: why its files cannot be read in slices; "" where they can.
        new_head: weights of the head that are in no file of that name.
        whole: the model around a vision part that trains.
    """

    model: Any
    settings: ModelSettings
    conversions: list[Any]
    whole_because: str
    new_head: dict[str, Tensor] = field(default_factory=dict)
    whole: Any = None


def open_model(settings: ModelSettings, device: str, shards: int) -> UnloadedModel:
    """Build a model on the meta device, with the attention of its layout on `device`, and check its files."""
    with _refusing(settings):
        setting = settings.setting
        headers = {
            name: torch.empty(shape, device="meta")
            for file in weight_files(Path(settings.path), setting)
            for name, shape in read_header(Path(settings.path, file), setting).items()
        }
        if head := _new_head(settings, headers):
            headers = {name: header for name, header in headers.items() if not name.startswith(f"{OUTPUT_LAYER}.")}
            headers |= {name: weight.to("meta") for name, weight in head.items()}
        probe = _build(settings, headers, OWN)
        report = _convert(probe, headers, conversions_of(probe, headers), "meta")
        if is_part(read_config(settings)):
            report.unexpected_keys = set()  # they are carried
        _check_names(report, setting)
        if lost := lost_names(probe, headers):
            raise DataError(
                f"{setting}: its weights do not come back from the model as they were in the files: {some(lost)}; "
                "engines and exported folders would get what they cannot read, so this model cannot be trained here"
            )
        whole_because = _why_whole(probe, shards)
        attention = attention_implementation(probe, settings.layout, device)
        model, weights = _build(settings, headers, attention), dict(probe.named_parameters())
        for name, weight in model.named_parameters():  # some models keep some weights in float32
            weight.data = weight.data.to(weights[name].dtype)
        model.carried = [] if settings.num_labels else carried_names(probe, headers)
        model.place = place_in_whole(model, settings)
        return UnloadedModel(model, settings, probe._weight_conversions, whole_because, head)


def load_weights(unloaded: UnloadedModel, device: str) -> None:
    """Fill a model that has been sharded, and that has its layers under their own names. Collective.

    Buffers that are in no file, such as the factors of rotary embeddings, are computed by the model's own code.
    """
    model, settings = unloaded.model, unloaded.settings
    vision = model._modules.pop(VISION, None)  # transformers would draw its weights anew
    with _refusing(settings):
        if unloaded.whole_because:
            _distribute(unloaded, device)
        else:
            with contextlib.ExitStack() as files:
                tensors = _open_tensors(Path(settings.path), files) | unloaded.new_head
                _convert(model, tensors, unloaded.conversions, device)
    if vision is not None:
        setattr(model, VISION, load_vision(unloaded.whole, settings, device))
    _check_numbers(model, settings)


def _new_head(settings: ModelSettings, names: Collection[str]) -> dict[str, Tensor]:
    """The weights of a head that is in no file, by name: drawn, or rows of the output layer."""
    config = read_config(settings)
    if settings.judging_tokens is None:
        return new_head(config, settings, names)
    with contextlib.ExitStack() as files:
        return judging_head(config, settings, _open_tensors(Path(settings.path), files))


# --- building --------------------------------------------------------------------------------------------------------
def _build(settings: ModelSettings, headers: Mapping[str, Tensor], attention: str) -> Any:
    """The model on the meta device, as `from_pretrained` builds it before it loads weights such as these."""
    config = read_config(settings)
    if quantization := getattr(config, "quantization_config", None):
        raise ValueError(
            f"its weights are quantized ({getattr(quantization, 'quant_method', None) or quantization}), and such "
            "weights cannot be trained; give the model in bfloat16 or float32"
        )
    options = {"dtype": DTYPES[settings.base_dtype], "attn_implementation": attention}
    with torch.device("meta"), meta_device_safe_creation_ops():
        if settings.num_labels:
            shapes = {name: tuple(tensor.shape) for name, tensor in headers.items()}
            model = token_classifier(config, settings, shapes)._from_config(config, **options)
        else:
            model = transformers.AutoModelForCausalLM.from_config(
                language_config(config, settings), trust_remote_code=settings.model.trust_remote_code, **options
            )
    if settings.head_apart:
        _hold_head_in_float32(model)
    with contextlib.suppress(OSError):  # it is optional
        model.generation_config = transformers.GenerationConfig.from_pretrained(settings.path)
    model.is_custom_code = functools.partial(bool, model.is_custom_code())  # FSDP2 gives it a class of torch's
    return model.eval()


def _hold_head_in_float32(model: Any) -> None:
    """Give an output layer without memory the type that it has with `head_dtype=fp32`, and have it loaded in it."""
    held = {id(weight): weight for weight in model.get_output_embeddings().parameters()}
    for weight in held.values():
        weight.data = weight.data.float()
    names = [name for name, weight in model.named_parameters(remove_duplicate=False) if id(weight) in held]
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), *names}


def read_config(settings: ModelSettings) -> Any:
    """The model's config.json, with the entries that the run changes."""
    with _refusing(settings):
        trust = settings.model.trust_remote_code
        config = transformers.AutoConfig.from_pretrained(settings.path, trust_remote_code=trust)
        changes, text = settings.model.override_config, config.get_text_config()
        text.update(changes)
        config.update({name: changes[name] for name in changes if hasattr(config, name)} if text is not config else {})
        return config


def is_part(config: Any) -> bool:
    """Tell if a model is the language part of a larger one, by its config.json."""
    return config.get_text_config() is not config


def language_config(config: Any, settings: ModelSettings) -> Any:
    """Return the config of the causal LM that is trained: all of it, or that of the language part.

    Raises:
        ConfigError: transformers has no causal LM for it.
    """
    text = config.get_text_config()
    if settings.model.trust_remote_code and hasattr(config, "auto_map"):
        return config
    if transformers.AutoModelForCausalLM._model_mapping.get(type(text), None) is None:
        if text.model_type in _BACKBONES:
            transformers.AutoModelForCausalLM.register(type(text), _language_model(type(text)), exist_ok=True)
            return text
        raise ConfigError(
            f"{settings.setting}: transformers has no causal LM for model_type={text.model_type}, of which "
            f"{', '.join(config.architectures or ['this model'])} is made; use a text model of its family"
        )
    return text


def _language_model(kind: type) -> type[Any]:
    """The causal LM of a language part of which transformers has the backbone alone."""
    backbone: Any = transformers.AutoModel._model_mapping.get(kind, None)
    family: Any = backbone.__mro__[1]

    class LanguageModel(family, transformers.GenerationMixin):  # type: ignore[misc]
        config_class, _tied_weights_keys = kind, {f"{OUTPUT_LAYER}.weight": f"model{_EMBEDDING}"}

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = backbone(config)
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, logits_to_keep: int | Tensor = 0, **inputs: Any) -> Any:
            states = self.model(**inputs).last_hidden_state
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            return CausalLMOutputWithPast(logits=self.lm_head(states[:, kept]))

    return LanguageModel


def _open_tensors(folder: Path, files: contextlib.ExitStack) -> dict[str, Any]:
    """The tensors of a model folder by name, of which nothing is read yet.

    Files are not mapped: mapped pages would count as this process's memory, and weights of the files' type stay there.
    """
    tensors = {}
    for name in weight_files(folder, str(folder)):
        file = files.enter_context(safe_open(folder / name, framework="pt", backend="pread"))
        tensors.update({tensor: file.get_slice(tensor) for tensor in file.keys()})
    return tensors


# --- loading ---------------------------------------------------------------------------------------------------------
def _convert(model: Any, tensors: dict[str, Any], conversions: list[Any], device: str) -> Any:
    config = _load_config(model, conversions, device)
    report, _ = convert_and_load_state_dict_in_model(model, tensors, config)
    if report.conversion_errors:
        made = some(sorted(report.conversion_errors))
        raise ValueError(f"{made} cannot be made of the tensors that are there; some are missing or of another shape")
    return _finalized(model, config, report)


def _finalized(model: Any, config: LoadStateDictConfig, report: LoadStateDictInfo) -> Any:
    """Have transformers tie what is tied and compute buffers that are in no file; returns its report.

    Its code for new weights may not know shards, so it leaves out modules whose tensors are all loaded; but those that
    have none may fill buffers of others (Falcon-H1).
    """
    for module in model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if own and all(getattr(tensor, "_is_hf_initialized", False) for tensor in own):
            module._is_hf_initialized = True
    return model._finalize_model_loading(model, config, report)


def _load_config(model: Any, conversions: list[Any], device: str) -> Any:
    return LoadStateDictConfig(
        ignore_mismatched_sizes=True,  # the library's own error does not say which; _check_names does
        device_map={"": device},
        dtype=model.config.dtype,
        dtype_plan=model._get_dtype_plan(model.config.dtype),
        weight_mapping=conversions,
    )


def _why_whole(model: Any, shards: int) -> str:
    """Why the files of a model, once loaded from them, cannot be read in slices; "" where they can."""
    steps = [step for conversion in model._weight_conversions for step in getattr(conversion, "operations", ())]
    for step in steps:
        name, along = type(step).__name__, getattr(step, "dim", -1)
        if not ((name == STACK and along == 0) or (name == JOIN and along > 0)):
            return f"transformers converts its weights by {name}"
    for name, weight in model.named_parameters() if steps else ():
        if weight.ndim > 2 and -(-len(weight) // shards) * (shards - 1) >= len(weight):
            return f"{name} is made of {len(weight)} tensors, too few for each of {shards} ranks to hold one"
    return ""


def _distribute(unloaded: UnloadedModel, device: str) -> None:
    """Load the whole model on rank 0 and give each rank its part, tensor by tensor. Collective."""
    model, settings = unloaded.model, unloaded.settings
    whole: dict[str, Tensor] = {}
    if dist.get_rank() == 0:
        logger.warning("%s is loaded whole by rank 0: %s", settings.path, unloaded.whole_because)
        config = read_config(settings)
        places = [step for step in unloaded.conversions if isinstance(step, PrefixChange)]
        auto = type(model) if settings.num_labels else transformers.AutoModelForCausalLM
        dtype = DTYPES[settings.head_dtype or settings.base_dtype]
        whole = auto.from_pretrained(
            settings.path,
            config=model.config if settings.num_labels else language_config(config, settings),
            key_mapping={step.source_patterns[0]: step.target_patterns[0] for step in places},
            dtype=dtype,
            use_safetensors=True,  # pickled weights can run code
            trust_remote_code=settings.model.trust_remote_code,
        ).state_dict() | {name: weight.to(dtype) for name, weight in unloaded.new_head.items()}
    names, filled = set(model.state_dict()), set()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in names:
            source = (
                whole[name].to(device, tensor.dtype)
                if whole
                else torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            )
            replace_tensor(model, name, source)
            model.get_parameter_or_buffer(name)._is_hf_initialized = True  # else transformers would draw it anew
            filled.add(name)
    report = LoadStateDictInfo(names - filled, set(), set(), [], {}, set())  # what is tied is not there twice
    _finalized(model, _load_config(model, [], device), report)
    model._weight_conversions = unloaded.conversions


# --- checks ----------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _refusing(settings: ModelSettings) -> Iterator[None]:
    """Turn what the library, and code that comes with a model, raise into a DataError that names the model."""
    verbosity = library.get_verbosity()
    library.disable_progress_bar()
    library.set_verbosity_error()  # its report of what is missing is a table; _check_names says it
    try:
        yield
    except (ConfigError, DataError):
        raise
    except Exception as error:  # of many kinds
        problem = str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"
        kind = "a model with a linear head" if settings.num_labels else "a causal LM"
        raise DataError(f"{settings.setting}: cannot load {kind}: {problem}") from error
    finally:
        library.set_verbosity(verbosity)


def _check_names(report: Any, setting: str) -> None:
    if report.mismatched_keys:
        mismatched = sorted(report.mismatched_keys)
        shapes = [f"{name} {tuple(shape)}, should be {tuple(wanted)}" for name, shape, wanted in mismatched]
        raise DataError(f"{setting}: the weights are not of the shapes that config.json says: {some(shapes)}")
    if report.missing_keys:
        raise DataError(f"{setting}: the weights are incomplete: there is no {some(sorted(report.missing_keys))}")
    if report.unexpected_keys:
        raise DataError(
            f"{setting}: the model that config.json describes has no {some(sorted(report.unexpected_keys))}, which "
            "the weights have; config and weights do not belong together"
        )


def _check_numbers(model: Any, settings: ModelSettings) -> None:
    """Check on all ranks that every rank's weights are numbers, and that what is to be tied is one tensor."""
    for name, other in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter(name) is not model.get_parameter(other):
            raise DataError(
                f"{settings.setting}: config.json ties {name} to {other}, and the weights have both, with different "
                f"values; set {settings.section}.override_config.tie_word_embeddings=false"
            )
    bad = [name for name, weight in model.named_parameters() if not bool(torch.isfinite(local_shard(weight)).all())]
    bad += [name for name, buffer in model.named_buffers() if buffer.is_meta or bool(torch.isnan(buffer).any())]
    bad_of_ranks: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(bad_of_ranks, bad)
    if names := sorted({name for of_rank in bad_of_ranks for name in of_rank}):
        raise DataError(f"{settings.setting}: nan or infinity in the weights: {some(names)}; the file is damaged")


# --- back to the form of the files -----------------------------------------------------------------------------------
def as_in_files(model: Any, tensors: Iterable[tuple[str, Tensor]], device: str = "cpu") -> Iterator[tuple[str, Tensor]]:
    """A model's tensors as its files had them: transformers' renamings and conversions are undone.

    Args:
        tensors: all of its parameters by name. Those that form one tensor of a file are held until all have come.
        device: of the tensors; the buffers that are in the files are copied to it, and come last.
    """
    back = [conversion.reverse_transform() for conversion in reversed(model._weight_conversions)]
    steps = _renamings_and_others(back)

    def group_of(name: str) -> str:
        return rename_source_key(name, *steps, reverse=True)[0]

    computed = {name for name, _ in model.named_non_persistent_buffers()}
    buffers = [(name, buffer.to(device)) for name, buffer in model.named_buffers() if name not in computed]
    plain = [name for _, _, name in merged(model)]
    members = Counter(group_of(name) for name in (*plain, *(name for name, _ in buffers)))
    held: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    seen = getattr(model, "vision_files", {})
    for source in (tensors, buffers):
        for name, tensor in source:
            if name in seen:
                yield seen[name], tensor
                continue
            group = group_of(name)
            held[group][name] = tensor
            if len(held[group]) == members[group]:
                yield from revert_weight_conversion(model, held.pop(group)).items()


def conversions_of(model: Any, files: Collection[str]) -> list[Any]:
    """Return transformers' conversions for a model, with the place that its language part has in such files."""
    found, inner = get_model_conversion_mapping(model), model.base_model_prefix
    if any(isinstance(step, PrefixChange) for step in found):
        return found
    for place in (name.removesuffix(_EMBEDDING) for name in files if name.endswith(_EMBEDDING)):
        if place.startswith(f"{inner}."):  # model.language_model
            return [PrefixChange(prefix_to_remove=place.removeprefix(f"{inner}."), model_prefix=inner), *found]
        if place.endswith(f".{inner}"):  # language_model.model
            return [PrefixChange(prefix_to_remove=place.removesuffix(f".{inner}")), *found]
    return found


def place_in_whole(model: Any, settings: ModelSettings) -> str:
    """Return the name of a language part in the model that it is a part of; "" if it is all of it."""
    config = read_config(settings)
    if not is_part(config) or settings.lora is None:
        return ""
    with torch.device("meta"):
        whole = getattr(transformers, config.architectures[0])._from_config(config)
    return next(name for name, module in whole.named_modules() if type(module) is type(model.base_model))


def vision_part(settings: ModelSettings, language: Any) -> Any:
    """What a folder has besides the language part with this backbone, in the whole model, without memory."""
    config, dtype = read_config(settings), settings.base_dtype if settings.trains_vision else settings.compute_dtype
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False  # neither of the two is there
    with _refusing(settings), torch.device("meta"), meta_device_safe_creation_ops():
        whole = getattr(transformers, config.architectures[0])._from_config(config, dtype=DTYPES[dtype])
    place = next(name for name, module in whole.named_modules() if type(module) in type(language).__mro__)
    for name in (place, OUTPUT_LAYER):
        whole.set_submodule(name, torch.nn.Identity())
    return whole.eval()


def load_vision(whole: Any, settings: ModelSettings, device: str) -> Any:
    """Fill a vision part, and return it."""
    with _refusing(settings), contextlib.ExitStack() as files:
        tensors = _open_tensors(Path(settings.path), files)
        report = _convert(whole, tensors, get_model_conversion_mapping(whole), device)
    if missing := sorted(report.missing_keys):
        raise DataError(f"{settings.setting}: the weights are incomplete: there is no {some(missing)}")
    return whole.base_model


def attach_vision(unloaded: UnloadedModel) -> None:
    """Make the vision part a part of a model that has no memory yet: it is sharded, trained and saved with it."""
    model, settings = unloaded.model, unloaded.settings
    unloaded.whole = whole = vision_part(settings, model.base_model)
    steps = _renamings_and_others(get_model_conversion_mapping(whole))
    files = {rename_source_key(file, *steps)[0]: file for file in model.carried}
    named = {name.removeprefix(f"{whole.base_model_prefix}."): files[name] for name in dict(whole.named_parameters())}
    model.vision_files = {f"{VISION}.{name}": file for name, file in named.items()}
    model.carried = sorted(set(model.carried).difference(named.values()))
    setattr(model, VISION, whole.base_model)


def carried_tensors(model: Any, settings: ModelSettings) -> Iterator[tuple[str, Tensor]]:
    """Yield what the files have and the model does not, as it is."""
    with contextlib.ExitStack() as files:
        tensors = _open_tensors(Path(settings.path), files) if model.carried else {}
        yield from ((name, tensors[name][:]) for name in model.carried)


def carried_names(model: Any, files: Collection[str]) -> list[str]:
    """Tensors of files that belong to no parameter or buffer of a model."""
    own, given, prefix = set(model.state_dict()), _given(model), f"{model.base_model_prefix}."
    steps = _renamings_and_others(model._weight_conversions)
    besides = (name for name in files if name.removeprefix(prefix) not in given)
    return sorted(name for name in besides if rename_source_key(name, *steps)[0] not in own)


def _renamings_and_others(conversions: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    renamings = [step for step in conversions if isinstance(step, WeightRenaming)]
    return renamings, [step for step in conversions if not isinstance(step, WeightRenaming)]


def lost_names(model: Any, files: Mapping[str, Tensor]) -> list[str]:
    """Tensors that `as_in_files` would give a name or a shape that the files do not have."""
    prefix = f"{model.base_model_prefix}."
    shapes = {name.removeprefix(prefix): tensor.shape for name, tensor in files.items()}
    return sorted(name for short, (name, shape) in _given(model).items() if shapes.get(short) != shape)


def _given(model: Any) -> dict[str, tuple[str, torch.Size]]:
    """Name and shape of what `as_in_files` gives, by the name that files of a model without its head have."""
    given = as_in_files(model, model.named_parameters(), "meta")
    return {name.removeprefix(f"{model.base_model_prefix}."): (name, tensor.shape) for name, tensor in given}


# --- linear heads ----------------------------------------------------------------------------------------------------
def check_head(shapes: Mapping[str, Sequence[int]], *, num_labels: int, setting: str) -> None:
    """Check that a folder has a linear head of so many outputs, by the shapes of the weights in its files."""
    if f"{HEAD}.weight" not in shapes:
        raise ConfigError(
            f"{setting}: its files have no {HEAD}.weight, so it is no sequence or token classifier; use a reward "
            "model, or train one"
        )
    if (outputs := shapes[f"{HEAD}.weight"][0]) != num_labels:
        raise ConfigError(
            f"{setting}: its head {HEAD}.weight has {outputs} outputs, and {num_labels} is needed; use another model"
        )


def check_family(config: Any, setting: str) -> type[Any]:
    """The family's class for sequence classification, by the model's config; `setting` names the folder in messages."""
    known: Any = AutoModelForSequenceClassification._model_mapping.get(type(config), None)
    if known is None or GenericForSequenceClassification not in known.__bases__:
        raise ConfigError(
            f"{setting}: model_type={config.model_type} has no classifier that is a backbone with a linear head; use a "
            "model of another family, such as Qwen3, Llama or Gemma"
        )
    return known


def token_classifier(config: Any, settings: ModelSettings, shapes: Mapping[str, Sequence[int]]) -> type[Any]:
    """The class of a model with `settings.num_labels` outputs at every token.

    Families without a token classifier of their own (Gemma 3, OLMo 2) get one of transformers' general parts. `config`
    is given the number of labels, whether the head has a bias, and the name of the class that will load an export.
    """
    setting = settings.setting
    if settings.lora is not None:
        raise ConfigError(
            f"{setting}: {LORA_RANK}={settings.lora.factors['r']}: a model with a linear head is trained whole, since "
            f"LoRA's factors would leave the head as it is; set {LORA_RANK}=0"
        )
    check_head(shapes, num_labels=settings.num_labels, setting=setting)
    known = check_family(config, setting)
    config.num_labels = settings.num_labels
    config.token_classification_bias = f"{HEAD}.bias" in shapes
    if not any(name.endswith("ForTokenClassification") for name in config.architectures or ()):
        config.architectures = [known.__name__]
    bases = [GenericForTokenClassification if b is GenericForSequenceClassification else b for b in known.__bases__]
    return type(known.__name__.replace("Sequence", "Token"), tuple(bases), {"__module__": known.__module__})


def judging_head(config: Any, settings: ModelSettings, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """The head of a causal LM that judges by its next token: two rows of its output layer, bad and good, by name.

    Math-Shepherd (arXiv 2312.08935) reads the logits of two tokens alone; two outputs are what is left of the layer.
    """
    setting, text = settings.setting, config.get_text_config()
    layer = OUTPUT_LAYER if f"{OUTPUT_LAYER}.weight" in tensors else EMBEDDINGS[0].removesuffix(".weight")
    if f"{layer}.weight" not in tensors or f"{HEAD}.weight" in tensors:
        raise ConfigError(
            f"{setting}: its files have no output layer (lm_head.weight), so it is no causal LM that judges steps by "
            "its next token; set reward_model.process.good=null and bad=null"
        )
    if getattr(text, "final_logit_softcapping", None):
        raise ConfigError(
            f"{setting}: final_logit_softcapping={text.final_logit_softcapping}: its logits are no linear function, so "
            "they cannot become a head; use a model of another family"
        )
    assert settings.judging_tokens is not None
    return {
        f"{HEAD}.{part}": torch.cat([tensors[f"{layer}.{part}"][i : i + 1] for i in settings.judging_tokens])
        for part in ("weight", "bias")
        if f"{layer}.{part}" in tensors
    }


def new_head(config: Any, settings: ModelSettings, names: Collection[str]) -> dict[str, Tensor]:
    """The weights of a new head, by name; {} where the files have a head, or `settings` ask for no new one.

    They are normal. Those of a reward model have the standard deviation 1 / sqrt(hidden_size + 1), as in "Learning to
    summarize from human feedback" (arXiv 2009.01325), whose reward models InstructGPT and TRL's examples follow: the
    first scores then differ by about 1. As values of a critic these would be noise as large as the returns, so with
    `small_new_head` it is 1 / (hidden_size + 1), as in OpenRLHF. They come from a random generator of their own, so any
    number of ranks draws the same ones.
    """
    if not settings.num_labels or settings.new_head_seed is None or f"{HEAD}.weight" in names:
        return {}
    hidden = config.get_text_config().hidden_size
    drawn = torch.randn(settings.num_labels, hidden, generator=torch.Generator().manual_seed(settings.new_head_seed))
    return {f"{HEAD}.weight": drawn / (hidden + 1 if settings.small_new_head else math.sqrt(hidden + 1))}
