"""A model folder: checks of its small files and the headers of its weight files, and what it says of itself.

A check reads no weights and needs neither torch nor transformers, so it takes milliseconds on the driver and reports
mistakes before engines start. Errors in the weights themselves (nan, a wrong shape) are found when they are loaded.

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
from typing import Any

from grpo_dist.errors import DataError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLED = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
MOST_NAMED = 3
EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight", "gpt_neox.embed_in.weight")
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class ModelFolder:
    """A model folder that passed the checks.

    Attributes:
        model_type: `model_type` of config.json, such as "qwen3".
        vocab_size: rows of the embedding; None if config.json does not say.
        shapes: shapes of the tensors in the weights, by name; empty if the weights were not checked.
        num_files: number of weight files; 0 if they were not checked.
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
    """Check config.json and the weights of a Hugging Face folder against each other.

    Args:
        setting: the key and value that name the folder, for messages ("actor_rollout_ref.model.path=models/qwen").
        trust_remote_code: whether Python code that comes with the model may run.
        weights: whether to check the weights; False: check only config.json.

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
    """Return a model's config.json as transformers reads it.

    Raises:
        DataError: it cannot be read without code that comes with the model.
    """
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

    Raises:
        DataError: a file is missing or damaged; the message names it.
    """
    named_ids = [text_config(read_object(Path(folder) / "config.json", setting)).get("eos_token_id")]
    generation = Path(folder) / "generation_config.json"
    if generation.is_file():
        named_ids.append(read_object(generation, setting).get("eos_token_id"))
    ids = [token_id for named in named_ids for token_id in (named if isinstance(named, list) else [named])]
    return {token_id for token_id in ids if isinstance(token_id, int)}


def read_header(file: Path, setting: str) -> Shapes:
    """Read the shapes of the tensors in a .safetensors file, by name.

    Raises:
        DataError: the header is damaged, or the file does not have the size that the header says.
    """
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
        raise DataError(f"{setting}: no {file.name} in the folder; {remedy}")
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
        apply_chat_template_kwargs: variables of the chat template.
        sampling: temperature, top_p, top_k, max_tokens and stop, as `SamplingSettings` has them.
        checkpoint: digest of the checkpoint that has the same weights (checkpoint/manifest.py); None: there is none.
        run: digest of the config.yaml of the run that exported it at its end; None: it was exported by a command.
        dtype: of the weights: "fp32" or "bf16".
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
    """Return what a model folder says of its use; the defaults if it says nothing.

    Raises:
        DataError: its file is not one that a run writes.
    """
    file = folder / FILE
    if not file.is_file():
        return Usage()
    try:
        return Usage(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise DataError(f"{file}: not as a run writes it: {error}; mend it, or remove it") from None
