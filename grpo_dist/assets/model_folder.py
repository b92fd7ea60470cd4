"""Folders of models and of LoRA adapters: their checks, what a model says of itself, and its tokenizer.

A check reads small files and the headers of weight files, and needs neither torch, transformers nor peft, so it takes
milliseconds on the driver and reports mistakes before engines start. Errors in the weights themselves (nan, a wrong
shape) are found when they are loaded.

A run writes which checkpoint its model is of, and how it asked it (`Usage`), into the folder before the folder appears:
there is no model without it, and whoever uses the folder asks as the run did.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_dist.assets import POLICY_KEY, expanded, is_folder
from grpo_dist.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLED = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
MOST_NAMED = 3
EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight", "gpt_neox.embed_in.weight")
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class ModelFolder:
    """A model folder that passed the checks.

    Attributes:
        vocab_size: rows of the embedding; None if config.json does not say.
        shapes: shapes of the tensors in the weights, by name; empty if the weights were not checked.
    """

    folder: Path
    config: dict[str, Any]
    model_type: str
    vocab_size: int | None
    shapes: Shapes
    num_files: int

    @property
    def num_parameters(self) -> int:
        """Number of parameters in the weights; 0 if they were not checked."""
        return sum(map(math.prod, self.shapes.values()))


def check_model_folder(
    folder: str | Path, *, setting: str, trust_remote_code: bool, weights: bool = True
) -> ModelFolder:
    """Check config.json and, with `weights`, the weights of a Hugging Face folder against each other.

    Raises:
        DataError: a file is missing, damaged or inconsistent with the others; the message names it.
    """
    folder = Path(folder)
    try:
        config = read_object(folder / "config.json", setting)
        model_type = _model_type(config, setting, trust_remote_code=trust_remote_code)
        files = weight_files(folder, setting) if weights else {}
        shapes: Shapes = {}
        for file, expected in files.items():
            of_file = read_header(folder / file, setting)
            missing = sorted(expected - of_file.keys())
            if missing:
                raise DataError(f"{setting}: {INDEX} names tensors that {file} does not hold: {some(missing)}")
            shapes |= of_file
    except OSError as error:
        raise DataError(f"{setting}: cannot be read: {str(error)[:300]}") from error
    if weights and not shapes:
        raise DataError(f"{setting}: the weights hold no tensors: {some(sorted(files))}")
    vocab_size = count(text_config(config), "vocab_size") or None
    if not trust_remote_code:  # custom code may give the sizes another meaning
        _check_embedding(shapes, vocab_size, setting)
    return ModelFolder(folder, config, model_type, vocab_size, shapes, len(files))


def read_model_config(folder: str | Path, setting: str) -> Any:
    """Return a model's config.json as transformers reads it; a DataError if that takes code of the model's own."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder)
    except Exception as error:  # of many kinds
        problem = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise DataError(
            f"{setting}: config.json cannot be read, without code that comes with the model: {problem}"
        ) from error


def end_token_ids(folder: str | Path, *, setting: str) -> set[int]:
    """The tokens that end a response, by config.json and, where there is one, generation_config.json.

    Rollout engines stop at them, and at the tokenizer's end of sequence.
    """
    named_ids = [text_config(read_object(Path(folder) / "config.json", setting)).get("eos_token_id")]
    generation = Path(folder) / "generation_config.json"
    if generation.is_file():
        named_ids.append(read_object(generation, setting).get("eos_token_id"))
    ids = [token_id for named in named_ids for token_id in (named if isinstance(named, list) else [named])]
    return {token_id for token_id in ids if isinstance(token_id, int)}


def read_header(file: Path, setting: str) -> Shapes:
    """Read the shapes of the tensors in a .safetensors file, by name."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np", backend="pread") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
    except SafetensorError as error:
        raise DataError(f"{setting}: {file.name}: damaged: {str(error)[:200]}; copy or download it again") from None


def read_object(
    file: Path, setting: str, remedy: str = "use a Hugging Face folder, or builtin:tiny-qwen3"
) -> dict[str, Any]:
    """Read a JSON file that must contain an object; `remedy` is for a folder without it."""
    if not file.is_file():
        lacks = f"no {file.name} in the folder" if file.parent.is_dir() else f"no such folder (looked in {Path.cwd()})"
        raise DataError(f"{setting}: {lacks}; {remedy}")
    try:
        content = json.loads(file.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{setting}: {file.name} is not JSON: {str(error)[:200]}") from None
    if not isinstance(content, dict):
        raise DataError(f"{setting}: {file.name} must be an object, is {type(content).__name__}")
    return content


def _model_type(config: dict[str, Any], setting: str, *, trust_remote_code: bool) -> str:
    where, section = f"{setting}: config.json", setting.partition("=")[0].rpartition(".")[0]
    model_type, own_code = config.get("model_type"), config.get("auto_map")
    if own_code and not trust_remote_code and not _known(model_type):
        raise DataError(
            f"{where}: model_type={model_type!r} runs Python code that comes with the model (auto_map); if you "
            f"trust it, set {section}.trust_remote_code=true"
        )
    if not isinstance(model_type, str) or not model_type:
        raise DataError(f"{where}: model_type is missing, so the model's architecture is unknown")
    if not own_code and not _known(model_type):
        raise DataError(
            f"{where}: model_type={model_type!r} is unknown to the installed transformers library; upgrade it"
        )
    return model_type


def _known(model_type: Any) -> bool:
    """Tell if transformers has this model type; it is imported only if no folder of that name exists."""
    library = importlib.util.find_spec("transformers")
    if library is None or not library.submodule_search_locations or not isinstance(model_type, str):
        return library is None
    models = Path(library.submodule_search_locations[0]) / "models"
    if model_type.isidentifier() and (models / model_type).is_dir():
        return True
    # some model types have folders of another name
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


def weight_files(folder: Path, setting: str) -> dict[str, set[str]]:
    """The weight files, each with the tensors that the index expects in it (without an index: none)."""
    if (folder / SINGLE).is_file():
        return {SINGLE: set()}
    if not (folder / INDEX).is_file():
        pickled = sorted(file.name for pattern in PICKLED for file in folder.glob(pattern))
        if pickled:
            raise DataError(
                f"{setting}: the weights are pickled ({some(pickled)}), which can run code when they are loaded; "
                f"convert them once: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
            )
        raise DataError(f"{setting}: no weights in the folder ({SINGLE}, or {INDEX} and its files)")
    weight_map = read_object(folder / INDEX, setting).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DataError(f"{setting}: {INDEX} has no weight_map")
    files: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise DataError(
                f"{setting}: {INDEX}: the file of {tensor} must be a name in the folder, is {str(file)[:80]!r}"
            )
        files.setdefault(file, set()).add(tensor)
    missing = sorted(file for file in files if not (folder / file).is_file())
    if missing:
        raise DataError(
            f"{setting}: {INDEX} names files that are missing: {some(missing)}; copy or download the folder again"
        )
    return files


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json that describes the language model: `text_config` in multimodal models."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def has_delta_nets(config: Mapping[str, Any]) -> bool:
    """Tell by config.json if layers are gated delta nets, a kind of linear attention."""
    return "linear_key_head_dim" in text_config(config)


def overridden(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with a run's changes, which are those of the language model where it has parts."""
    text = text_config(config)
    if text is config:
        return {**config, **changes}
    return {**config, **{name: changes[name] for name in changes if name in config}, "text_config": {**text, **changes}}


def count(text: Mapping[str, Any], name: str) -> int:
    """The positive integer called `name` in config.json; 0 if there is none."""
    value = text.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _check_embedding(shapes: Shapes, vocab_size: int | None, setting: str) -> None:
    for name in EMBEDDINGS:
        shape = shapes.get(name, ())
        if vocab_size is not None and shape and shape[0] != vocab_size:
            raise DataError(
                f"{setting}: config.json says vocab_size={vocab_size}, the weights have {shape[0]} rows in {name}; "
                f"config.json and weights are from different models"
            )


def some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


FILE = "grpo_dist.json"


@dataclass(frozen=True)
class Usage:
    """The way to ask a model, and the checkpoint that it is of.

    Attributes:
        step: the training step after which the model was written; None: not known.
        system_prompt: comes first, where a prompt has no system message of its own.
        apply_chat_template: whether a prompt that is a text is a message of the user.
        sampling: temperature, top_p, top_k, max_tokens and stop, as `SamplingSettings` has them.
        checkpoint: digest of the checkpoint that has the same weights (checkpoint/manifest.py); None: there is none.
        run: digest of the config.yaml of the run that exported it at its end; None: it was exported by a command.
    """

    step: int | None = None
    system_prompt: str | None = None
    apply_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    run: str | None = None
    dtype: str | None = None
    apply_chat_template: bool = True

    def write(self, folder: Path) -> None:
        """Write it into the folder of a model."""
        (folder / FILE).write_text(json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_usage(folder: Path) -> Usage:
    """Return a model folder's word on its use, or the defaults; a DataError if its file is not as a run writes it."""
    file = folder / FILE
    if not file.is_file():
        return Usage()
    try:
        return Usage(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise DataError(f"{file}: not as a run writes it: {error}; mend it, or remove it") from None


# --- adapters in peft's form ----------------------------------------------------------------------------------------
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_FOLDER = "lora_adapter"  # beside the merged model; verl's name
PREFIX = "base_model.model."  # peft's, before the name of a module
A, B = ".lora_A.weight", ".lora_B.weight"
_WRITTEN = "give a folder that peft's save_pretrained, or a run of this trainer, has written"
REMEDY = "merge the adapter into its base model (peft's merge_and_unload) and train that"
# What changes W + lora_alpha / r * B A into another function, or trains more than factors: by entry of the config, the
# values that do not.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    # the others change the weights of the base model
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}
_NOT_TAKEN = (
    *("use_dora", "use_rslora", "use_qalora", "use_bdlora", "lora_bias", "modules_to_save", "rank_pattern"),
    *("alpha_pattern", "layer_replication", "target_parameters", "trainable_token_indices", "alora_invocation_tokens"),
)


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter that passed the checks: (inputs, outputs) by the name of the module; B A is scaled by alpha / rank."""

    rank: int
    alpha: float
    layers: Mapping[str, tuple[int, int]]


def read_adapter_folder(folder: str | Path, setting: str) -> AdapterFolder:
    """Check adapter_config.json and the header of the weights against each other.

    Raises:
        DataError: it is no folder with an adapter of plain LoRA, or a factor is missing or of another shape.
    """
    folder = expanded(str(folder))
    if not is_folder(folder):
        raise DataError(f"{setting}: there is no such folder; give one with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}")
    file = folder / ADAPTER_WEIGHTS
    try:
        rank, alpha = _rank_and_alpha(read_object(folder / ADAPTER_CONFIG, setting, _WRITTEN), setting)
        if not file.is_file():
            pickled = sorted(other.name for other in folder.glob("adapter_model.*"))
            why = f"the weights are pickled ({some(pickled)}), which can run code when loaded" if pickled else ""
            raise DataError(
                f"{setting}: {why or 'no weights in the folder'}; {ADAPTER_WEIGHTS} is needed, which peft's "
                "save_pretrained(FOLDER) writes"
            )
        return AdapterFolder(rank, alpha, _layers(read_header(file, setting), rank, setting))
    except OSError as error:
        raise DataError(f"{setting}: cannot be read: {str(error)[:200]}") from None


def _rank_and_alpha(config: Mapping[str, Any], setting: str) -> tuple[int, float]:
    odd = {key: config.get(key) for key, plain in _PLAIN.items() if config.get(key) not in plain}
    odd |= {key: config[key] for key in _NOT_TAKEN if config.get(key)}
    if odd:
        named = ", ".join(f"{key}={json.dumps(value)[:80]}" for key, value in odd.items())
        raise DataError(
            f"{setting}: {ADAPTER_CONFIG} says {named}; only plain LoRA, one rank and alpha for all layers, is trained "
            f"here: {REMEDY}"
        )
    return _number(config, "r", int, setting), float(_number(config, "lora_alpha", int | float, setting))


def check_base(adapter: AdapterFolder, shapes: Shapes, setting: str) -> None:
    """Check an adapter against the tensors of its base model.

    A model's modules may have other names than its files, at their beginning; so what follows it is compared.
    """
    matrices = {f".{name}": shape for name, shape in shapes.items() if len(shape) == 2}
    for name, sizes in adapter.layers.items():
        end = f".{name.partition('.')[2] or name}.weight"
        of_layer = [shape for matrix, shape in matrices.items() if matrix.endswith(end)]
        if not of_layer:
            raise DataError(f"{setting}: it has factors for {name}, which the model has not: {_OTHER_BASE}")
        if not any(sorted(shape) == sorted(sizes) for shape in of_layer):  # of Conv1D layers inputs come first
            raise DataError(
                f"{setting}: its factors for {name} are of a layer with {sizes[0]} inputs and {sizes[1]} outputs, and "
                f"the model's weight is of shape {of_layer[0]}: {_OTHER_BASE}"
            )


_OTHER_BASE = f"it belongs to another base model (base_model_name_or_path in {ADAPTER_CONFIG})"


def _layers(shapes: Shapes, rank: int, setting: str) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of each layer, from the shapes of its factors."""
    odd = sorted(name for name in shapes if not (name.startswith(PREFIX) and name.endswith((A, B))))
    if odd or not shapes:
        what = f"tensors that are no factors of linear layers: {some(odd)}" if odd else "no tensors"
        raise DataError(f"{setting}: {ADAPTER_WEIGHTS} holds {what}; only those are trained here: {REMEDY}")
    stems = dict.fromkeys(name.removesuffix(A).removesuffix(B) for name in shapes)
    if missing := [stem + end for stem in stems for end in (A, B) if stem + end not in shapes]:
        raise DataError(f"{setting}: {ADAPTER_WEIGHTS} lacks {some(missing)}; copy the folder again")
    layers = {}
    for stem in stems:
        a, b = shapes[stem + A], shapes[stem + B]
        if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank:
            raise DataError(
                f"{setting}: {ADAPTER_CONFIG} says r={rank}, and {stem + A} is of shape {a}, {stem + B} of {b}; config "
                "and weights do not belong together"
            )
        layers[stem.removeprefix(PREFIX)] = (a[1], b[0])
    return layers


def _number(config: Mapping[str, Any], key: str, kind: Any, setting: str) -> Any:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, kind) or value <= 0:
        raise DataError(f"{setting}: {ADAPTER_CONFIG}: {key} must be a number above 0, is {json.dumps(value)[:80]}")
    return value


# --- the tokenizer --------------------------------------------------------------------------------------------------
# It is the same one for training, engines, servers and exports. `tokenizer.json` is read as it is: AutoTokenizer builds
# many tokenizers anew from the class that the files name, with the vocabulary and the merges of `tokenizer.json` but
# the class's own way to cut a text, and then a text has other tokens than those that the model was trained on.
# Without one of these transformers builds an empty tokenizer from config.json alone, without a word.
_TOKENIZER_FILES = ("tokenizer.json", "tekken.json", "*.model", "vocab.*", "*.tiktoken")


def load_tokenizer(path: str, *, trust_remote_code: bool, key: str = POLICY_KEY) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder on this machine."""
    setting, folder = f"{key}={path}", Path(path)
    if not folder.is_dir():
        raise DataError(f"{setting}: no such folder (looked in {Path.cwd()}); give a Hugging Face model folder")
    if not (folder / "config.json").is_file():
        raise DataError(f"{setting}: not a Hugging Face model folder: it has no config.json")
    if not any(file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern)):
        raise DataError(f"{setting}: no tokenizer in the folder (no tokenizer.json); save it next to the model")
    try:
        if is_read_as_it_is(folder, trust_remote_code=trust_remote_code):
            from transformers import PreTrainedTokenizerFast  # imports neither torch nor models, which takes seconds

            return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise DataError(f"{setting}: cannot load the tokenizer: {problem}") from error


def is_read_as_it_is(folder: Path, *, trust_remote_code: bool) -> bool:
    """Say if a folder's `tokenizer.json` is all there is to its tokenizer: it comes with no trusted code of its own."""
    if not (folder / "tokenizer.json").is_file():
        return False
    settings = folder / "tokenizer_config.json"
    if not trust_remote_code or not settings.is_file():
        return True
    own_code = json.loads(settings.read_text(encoding="utf-8")).get("auto_map") or ()
    return not (isinstance(own_code, list) or "AutoTokenizer" in own_code)


def continued(messages: Sequence[Mapping[str, Any]], answer: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a conversation in which the answer goes on from the last turn of `messages`, if both are the assistant's.

    A policy's response is such an answer: where a prompt ends in a begun turn, the two are one turn.
    """
    if not (messages and answer and messages[-1]["role"] == answer[0]["role"] == "assistant"):
        return [*messages, *answer]
    turn = {**messages[-1], **answer[0], "content": messages[-1]["content"] + answer[0]["content"]}
    return [*messages[:-1], turn, *answer[1:]]
