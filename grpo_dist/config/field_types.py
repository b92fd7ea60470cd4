"""The base class of config sections, and the types of config values: numbers, counts or -1, names, lists of files."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from grpo_dist.errors import did_you_mean
from grpo_dist.plugins.names import parse_code


@dataclass(frozen=True)
class Mark:
    """A mark on a field of a section: what a checkpoint does with another value, for all keys below that field.

    A key without a mark is a part of the experiment: the run goes on with another value only if it is told to.

    Attributes:
        kind: "free": results do not depend on it, nothing is said; "shown": results change, but not the experiment;
            "length": shown where a learning rate depends on it, else free; "refused": not even on demand.
        why: why it is refused.
        switch: a key that must be above 0 for the mark to count; "": it always counts.
    """

    kind: Literal["free", "shown", "length", "refused"]
    why: str = ""
    switch: str = ""


class Resume:
    """The marks of several keys."""

    FREE, SHOWN, LENGTH = Mark("free"), Mark("shown"), Mark("length")
    OTHER_MODEL = Mark("refused", "the saved weights are those of another model")
    OTHER_FACTORS = Mark("refused", "the saved factors have another shape or scale")
    OTHER_LAYERS = Mark("refused", "the saved factors belong to other modules")
    OTHER_DTYPE = Mark("refused", "weights and optimizer states were saved in another dtype")
    OTHER_ORDER = Mark("refused", "the saved position is one in another order of the rows")


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class Section(BaseModel):
    """Base class of a config section: immutable, rejects unknown keys, never converts types silently."""

    # constants: infinity, in a mapping that is free, is written as itself and not as null
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, protected_namespaces=(), ser_json_inf_nan="constants"
    )

    def replaced(self, **values: Any) -> Self:
        """Return the section with other values of some keys, which are taken as they are."""
        return self.model_copy(update=values)


def _number(value: Any) -> Any:
    # Plain YAML 1.1 reads 1e-6 as text; Hydra reads it as a number. Both mean the number.
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _at_least_or_minus_one(least: int) -> Callable[[int], int]:
    def check(value: int) -> int:
        if value != -1 and value < least:
            raise ValueError(f"must be -1 or at least {least}")
        return value

    return check


def as_tuple(value: Any) -> Any:
    """YAML's lists are tuples in a config."""
    return tuple(value) if isinstance(value, list) else value


def _at_home(path: str) -> str:
    """Replace ~, as a shell does where it stands alone, by the home folder."""
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ValueError("there is no such user; write ./~... for a folder of that name")
    if "\0" in expanded:
        raise ValueError("no path has a null character")
    return expanded


def _folder_name(name: str) -> str:
    parts = name.split("/")
    if "\0" in name or any(part in ("", ".", "..") or part.startswith("~") for part in parts):
        raise ValueError("names folders: no part between / may be empty, . or .., or begin with ~")
    return name


def _bound_address(value: str) -> str:
    with contextlib.suppress(ValueError):
        return value if value == "auto" else str(ipaddress.ip_address(value))
    raise ValueError("neither auto nor an IP address; the name by which agents find it is endpoint_advertised_host")


def _reachable_host(value: str) -> str:
    if value in ALL_INTERFACES or not re.fullmatch(r"[\w.-]+|[\da-fA-F.]*(:[\da-fA-F.]*){2,}", value):
        raise ValueError("not a name or an address that agents can reach; write it alone, without http:// and port")
    return value


def _one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, str) else as_tuple(value)


def _none_or_more(value: Any) -> Any:
    return () if value is None else _one_or_more(value)


# TRL's loss_type -> actor.loss_agg_mode.
TRL_LOSS_TYPES = {
    "grpo": "seq-mean-token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "bnpo": "token-mean",
    "dapo": "token-mean",
}


def not_one_of(value: Any, names: Sequence[str]) -> str:
    """The error message for a value that is not one of `names`; suggests the one of TRL's meaning, or the closest."""
    meant = TRL_LOSS_TYPES.get(str(value))
    hint = f"; TRL's {value} is {meant} here" if meant in names else did_you_mean(str(value), names)
    return f"not one of {', '.join(names)}{hint}"


def builtin_or_custom(names: Sequence[str]) -> AfterValidator:
    """Accepts a built-in name, or `pkg.module:attr` / `path/to/file.py:attr`."""

    def check(value: str) -> str:
        if value in names or parse_code(value).attribute:
            return value
        if ":" in value:
            raise ValueError("not of the form pkg.module:function or path/to/file.py:function")
        raise ValueError(not_one_of(value, names))

    return AfterValidator(check)


def _some_and_distinct(values: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    if values is not None and not values:
        raise ValueError("the list is empty; set it to null for the default")
    if values is not None and len(set(values)) < len(values):
        twice = next(value for i, value in enumerate(values) if value in values[:i])
        raise ValueError(f"names {twice} twice")
    return values


def _alias(names: Mapping[str, str], *, held: bool = False) -> BeforeValidator:
    """Translates the names of PyTorch, vLLM and verl into the name that this key uses; `held`: of weights."""

    def canonical(value: Any) -> Any:
        name = names.get(value, value) if isinstance(value, str) else value
        if name == "fp16" and held:
            raise ValueError("weights in float16 lose small updates; use float32 here, and float16 for passes (dtype)")
        return name

    return BeforeValidator(canonical)


_TRAIN_NAMES = {"bfloat16": "bf16", "float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16"}
_ENGINE_NAMES = {"bf16": "bfloat16", "fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16"}

Float = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
PositiveFloat = Annotated[Float, Field(gt=0)]
NonNegativeFloat = Annotated[Float, Field(ge=0)]
Share = Annotated[Float, Field(ge=0, le=1)]
DecayRate = Annotated[Float, Field(ge=0, lt=1)]
PositiveShare = Annotated[Float, Field(gt=0, le=1)]

_MOST = 2**63 - 1  # what torch and Arrow take
Count = Annotated[int, Field(ge=1, le=_MOST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=_MOST)]
CountOrMinusOne = Annotated[int, Field(le=_MOST), AfterValidator(_at_least_or_minus_one(1))]
NonNegativeOrMinusOne = Annotated[int, Field(le=_MOST), AfterValidator(_at_least_or_minus_one(0))]
# The layout of the processes on the machines is made while the config is checked: a slip of the finger must not fill
# the memory. The largest clusters have a tenth of these.
Machines = Annotated[int, Field(ge=1, le=4096)]
GpusPerMachine = Annotated[int, Field(ge=0, le=128)]
Processes = Annotated[int, Field(ge=1, le=4096 * 128)]

Text = Annotated[str, Field(min_length=1)]
Folder = Annotated[Text, AfterValidator(_at_home)]
FolderName = Annotated[Text, AfterValidator(_folder_name)]
ALL_INTERFACES = ("0.0.0.0", "::")
BoundAddress = Annotated[Text, AfterValidator(_bound_address)]
ReachableHost = Annotated[Text, AfterValidator(_reachable_host)]
Files = Annotated[tuple[Text, ...], BeforeValidator(_one_or_more), Field(min_length=1)]
# One function, or a list of functions: a name, null for the built-in scorers, or a mapping as weighted.py has them.
Functions = Annotated[tuple[Text | dict[str, Any] | None, ...], Field(min_length=1)]
OptionalFiles = Annotated[tuple[Text, ...], BeforeValidator(_none_or_more)]
Entries = dict[str, Annotated[Any, BeforeValidator(_number)]]  # what somebody else's function is given by name
Names = BeforeValidator(_one_or_more)
OptionalNames = BeforeValidator(_none_or_more)
Pair = BeforeValidator(as_tuple)
Distinct = AfterValidator(_some_and_distinct)


def _dry_run(value: Any) -> Any:
    if not isinstance(value, bool) and value != "config":
        raise ValueError("must be true (check the config and this machine), config (check the config only), or false")
    return value


DryRun = Annotated[bool | Literal["config"], BeforeValidator(_dry_run)]
TrainDtype = Literal["fp32", "bf16"]
PassDtype = Literal["fp32", "bf16", "fp16"]
RolloutDtype = Literal["float32", "bfloat16", "float16"]
_Computes = Literal["generate", "ref_log_prob", "old_log_prob", "values", "reward_model"]
_Changes = Literal["update", "update_critic", "update_reward_model", "sync_weights"]
TimedStage = Literal[_Computes, _Changes, "save_checkpoint", "load_checkpoint", "export_hf_model", "profile"]
TrainDtypeName = Annotated[TrainDtype, _alias(_TRAIN_NAMES, held=True)]
PassDtypeName = Annotated[PassDtype, _alias(_TRAIN_NAMES)]
HeadDtypeName = Annotated[Literal["fp32"], _alias(_TRAIN_NAMES, held=True)]
EIGHT_BIT, NEEDS_TORCHAO = "AdamW8bit", "needs torchao: pip install 'torchao>=0.18,<0.19' (the extra torchao)"
OptimizerName = Annotated[Literal["AdamW", "AdamW8bit"], _alias({"_AdamW": "AdamW"})]  # _AdamW: torchao's
RolloutDtypeName = Annotated[RolloutDtype, _alias(_ENGINE_NAMES)]
