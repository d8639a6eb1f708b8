"""The shape of a LLaMA: the fields of config.json that this model computes."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from kernels import InputError
from model.config_keys import LONGEST_TEXT, ORIGINAL_LENGTH, as_list, read_keys
from model.family import FAMILIES, FULL, OPTIONAL_KEYS, SLIDING, Family
from model.json_file import errors_in, expect, read_object


@dataclass(frozen=True)
class LlamaConfig:
    """Fields are config.json's keys. Sizes are in elements; rms_norm_eps has no default, since no value is safe.

    `rope_scaling` holds its `rope_type` and the numbers that model/rope.py reads, or is None.
    `norm` names a norm that is not RMSNorm, as --norm does (kernels/__init__.py); it is None for every LLaMA.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float = 10000.0  # what config.json means by leaving it out
    rope_scaling: dict[str, Any] | None = None
    rope_local_base_freq: float | None = None  # rope_theta of the layers with a window; None where all have one base
    sliding_window: int | None = None
    layer_types: list[str] | None = None  # None: all layers have the window, or none has
    query_pre_attn_scalar: int | None = None  # attention's scale is its inverse root; None is head_dim
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    embedding_multiplier: float | None = None
    attention_multiplier: float | None = None  # attention's scale itself
    residual_multiplier: float | None = None  # of what each sub-layer adds to the residual stream
    logits_scaling: float | None = None  # divides the logits
    attention_bias: bool = False
    attention_dropout: float = 0.0  # kept, and not computed: it acts in training alone
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    model_type: str = "llama"
    norm: str | None = None

    @classmethod
    def load(cls, path: str | Path, rms_norm_eps: float | None = None) -> LlamaConfig:
        """Read config.json at `path`; `rms_norm_eps` overrides the file's. Raises InputError naming key and value."""
        values = read_object(path)
        with errors_in(path):
            return cls.from_dict(values, rms_norm_eps, path)

    @classmethod
    def from_dict(
        cls, values: dict[str, Any], rms_norm_eps: float | None = None, path: str | Path = "config.json"
    ) -> LlamaConfig:
        """Check the keys of a config.json and fill in what the family's own config leaves out.

        `rms_norm_eps` overrides that of `values`. Raises InputError naming key and value. Keys that nobody reads are
        named on stderr, with `path` as their file.
        """
        if rms_norm_eps is not None:
            values = values | {"rms_norm_eps": rms_norm_eps}
        values = read_keys(values, [field.name for field in fields(cls)], path)
        for field in fields(cls):
            if field.default is MISSING and field.name not in values:
                flag = ", or use --norm-eps" if field.name == "rms_norm_eps" else ""
                raise InputError(f"{field.name} is missing; no default is safe: add the model's own{flag}")
        return cls(**values)

    def __post_init__(self) -> None:
        n_heads, n_kv_heads = self.num_attention_heads, self.num_key_value_heads
        if n_heads % n_kv_heads:
            raise InputError(f"num_attention_heads {n_heads} is not divisible by num_key_value_heads {n_kv_heads}")
        expect(self.head_dim % 2 == 0, "head_dim", self.head_dim, "an even number, since RoPE rotates pairs")
        kind = (self.rope_scaling or {}).get("rope_type")
        # Dynamic's and YaRN's formulas would divide by zero.
        expect(kind != "dynamic" or self.head_dim > 2, "head_dim", self.head_dim, "at least 4 for rope_type dynamic")
        expect(kind != "yarn" or self.rope_theta > 1, "rope_theta", self.rope_theta, "more than 1 for rope_type yarn")

    @property
    def family(self) -> Family:
        """What tells this model from a LLaMA."""
        return FAMILIES[self.model_type]

    @property
    def context_length(self) -> int:
        """The largest number of tokens in a text: max_position_embeddings, or more if RoPE is scaled.

        Dynamic scaling does nothing up to max_position_embeddings, and YaRN stretches the original length. For linear
        scaling both readings of max_position_embeddings are in use, and the shorter one is safe.
        """
        scaling, length = self.rope_scaling or {}, self.max_position_embeddings
        kind = scaling.get("rope_type")
        if kind not in ("dynamic", "yarn"):
            return length
        original = scaling.get(ORIGINAL_LENGTH, length) if kind == "yarn" else length
        return int(min(max(length, original * scaling["factor"]), LONGEST_TEXT))

    def layer_kinds(self) -> list[str]:
        """The kind of each layer: FULL, or SLIDING with a window."""
        alike = FULL if self.sliding_window is None else SLIDING
        return self.layer_types or [alike] * self.num_hidden_layers

    def for_layers(self, kind: str) -> LlamaConfig:
        """This config as if all layers were of that kind: its window, and its RoPE."""
        if kind == FULL:
            return replace(self, sliding_window=None, layer_types=None)
        if self.rope_local_base_freq is None:
            return replace(self, layer_types=None)
        return replace(self, layer_types=None, rope_theta=self.rope_local_base_freq, rope_scaling=None)

    def end_ids(self) -> set[int]:
        """The ids that end a text: eos_token_id may be one, several or none."""
        return set(as_list(self.eos_token_id)) - {None}

    def to_dict(self) -> dict[str, Any]:
        """The keys of a config.json that transformers loads as the same model, or refuses if `norm` is set."""
        values = asdict(self)
        if self.rope_scaling is None:
            del values["rope_scaling"]
        for key in ("layer_types", *OPTIONAL_KEYS):
            if key not in self.family.defaults and values[key] is None:
                del values[key]
        if self.norm is None:
            del values["norm"]
        else:
            # The unknown model_type stops transformers' Auto classes. LlamaForCausalLM.from_pretrained only warns of
            # it, and is stopped by an rms_norm_eps of null, which is the truth: there is no RMSNorm.
            values |= {"model_type": f"rms{self.model_type}", "rms_norm_eps": None, "norm_eps": self.rms_norm_eps}
        architecture = f"{values['model_type'].removesuffix('_text').capitalize()}ForCausalLM"
        return {"architectures": [architecture], "hidden_act": self.family.activation[0], **values}
