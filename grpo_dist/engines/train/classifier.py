"""Models with a linear head instead of an output layer: reward models, process reward models, critics.

Such a model is saved as a `...ForSequenceClassification`, which computes the head at every token and keeps the last
one, or as a `...ForTokenClassification`, which keeps all. Here every one is the latter: its outputs at all tokens are a
tensor (B, L, num_labels), small enough to keep, and a caller picks the tokens that it means.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from grpo_dist.assets.model_folder import EMBEDDINGS
from grpo_dist.engines.settings import ModelSettings
from grpo_dist.engines.train.forward import CHECKED_TOKENS, PolicyForward
from grpo_dist.engines.train.micro_batch import MicroBatch
from grpo_dist.errors import ConfigError

HEAD = "score"
OUTPUT_LAYER = "lm_head"  # of a causal LM


def check_head(shapes: Mapping[str, Sequence[int]], *, num_labels: int, setting: str) -> None:
    """Check that a folder has a linear head of so many outputs.

    Args:
        shapes: of the weights in its files, by name.
        num_labels: outputs that the head must have.
        setting: the key and value that name the folder, for messages.

    Raises:
        ConfigError: there is no head in the files, or it has another number of outputs.
    """
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
    """The family's class for sequence classification, by the model's config; `setting` names the folder in messages.

    Raises:
        ConfigError: the family's classifier is not a backbone with a linear head.
    """
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

    Args:
        shapes: of the weights in its files, by name.
    """
    setting = settings.setting
    if settings.lora is not None:
        raise ConfigError(
            f"{setting}: lora_rank={settings.lora.lora_rank}: a model with a linear head is trained whole, since "
            "LoRA's factors would leave the head as it is; set lora_rank=0"
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

    Args:
        settings: what the model is loaded from, with `judging_tokens`.
        tensors: of its files by name, of which rows can be read.
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


class Values(NamedTuple):
    """(M,) float32 values of the M response tokens: the head's output at the token before each of them; of a head with
    two outputs, bad and good, the log odds of good: the second less the first.
    """

    values: Tensor


class ValueForward(PolicyForward):
    """Runs a token classifier over micro-batches, in the layouts of a policy. Takes the arguments of `PolicyForward`.

    The value of a response token is read at the token that precedes it: what the model says of the state in which the
    token is chosen, as verl's critic. Who wants the value at a sequence's last token appends one more token to it.
    """

    computes, unit = "values", " of their size"
    without_head = ""

    def __call__(self, micro_batch: MicroBatch, **options: Any) -> Values:  # type: ignore[override]
        """The values of the response tokens; `options` are those of a policy, which has more to say."""
        logits = self._at_predictors(micro_batch, self._run(micro_batch).logits)
        return Values(logits[:, 0] if logits.shape[-1] == 1 else logits[:, 1] - logits[:, 0])

    def _at_predictors(self, micro_batch: MicroBatch, outputs: Tensor) -> Tensor:
        """(M, ...) float32 of the model's outputs at this rank's tokens, (B, L, ...)."""
        group = self.group_of(micro_batch)
        numbers, predictors = group.own(micro_batch.predictors, micro_batch.input_ids.shape[1])
        return group.whole(outputs.flatten(0, 1)[predictors].float(), numbers, len(micro_batch.targets))

    def scale(self, alone: Tensor) -> float:
        """Values have no unit: a reward model may give scores around 20, whose rounding is as much larger."""
        return max(1.0, alone.abs().mean().item())

    def compared(self, micro_batch: MicroBatch) -> Tensor:
        """See `PolicyForward.compared`; the values of a head that is drawn for the check.

        The model's own may be near 0, as a critic's is at first: it would hide any difference between its inputs.
        """
        inputs: list[Tensor] = []
        with getattr(self.model, HEAD).register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0])):
            self._run(micro_batch)
        states = self._at_predictors(micro_batch, inputs[0])
        drawn = torch.randn(states.shape[1], generator=torch.Generator().manual_seed(0))
        return states @ (drawn / math.sqrt(states.shape[1])).to(states.device)

    def compared_alone(self, row: MicroBatch, tokens: int = CHECKED_TOKENS) -> Tensor:
        """See `PolicyForward.compared_alone`."""
        return self.compared(row)[-tokens:]
