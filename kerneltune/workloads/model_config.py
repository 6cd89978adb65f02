"""Read the sizes of a language model's layers from its Hugging Face `config.json`, also without `transformers`."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from kerneltune.files import read_text

_MOST_SIZE = 1 << 24
"""Largest size that is accepted."""
_MOST_BYTES = 16 << 20
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_n_heads", "multi_query_group_num")
_HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels")
_MLP = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "intermediate_size_mlp")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
_EXPERT_MLP = ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size", "expert_intermediate_size")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "num_selected_experts", "top_k", "moe_top_k")
_SHARED = ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size")
_SHARED_COUNT = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_INNER = ("text_config", "llm_config", "language_config", "thinker_config", "decoder")
_OF_ALL_PARTS = ("dtype", "torch_dtype", "model_type", "logit_scale_init_value")
"""Fields of a composite model that hold for its text model unless that has its own."""
_RMS = ("rms_norm_eps", "layernorm_rms_eps")
_PARTS = ("attn_config", "ffn_config")
"""Objects inside a file that hold a part of its sizes, as DBRX has them."""
_TRAITS: Mapping[str, tuple[str, ...]] = {
    # RMSNorm though no field says so; no RMSNorm though a field says so
    "rms": (
        "deepseek_v", "gemma", "gpt_oss", "lfm2", "llama", "mistral", "mixtral", "nanochat", "phi3", "qwen2", "qwen3", "step3",
    ),
    "layer norm": ("phimoe",),
    # queries and keys normalized head by head; all heads together; weights that are added to 1
    "head norms": (
        "afmoe", "apertus", "doge", "dots1", "exaone4", "exaone_moe", "gemma3", "gemma4", "diffusion_gemma", "glm5",
        "hunyuan_v1", "hunyuan_vl", "hy_v3", "inkling", "laguna", "lfm2", "mellum", "minimax_m3", "nanochat", "qwen3", "qwen4",
        "step3", "t5gemma2",
    ),
    "wide norms": ("olmo2", "olmo3", "olmoe", "flex_olmo", "olmo_hybrid", "minimax_m2"),
    "zero-centered": ("gemma", "diffusion_gemma", "vaultgemma", "t5gemma", "qwen3_next", "qwen3_5", "recurrent_gemma"),
    # a single matrix for gate and up; for query, key and value
    "fused mlp": ("modernbert", "phi3", "phi4", "glm4", "glm", "chatglm", "-glm4_moe", "-glm4v_moe", "-glm_moe"),
    "fused attention": (
        "bloom", "chatglm", "codegen", "dbrx", "falcon", "-falcon_h1", "fuyu", "gpt2", "gpt_bigcode", "gpt_neox", "mpt",
        "openai-gpt", "persimmon", "phi3", "phi4",
    ),
    # no gate beside up; a gate that is no plain product of activation and up
    "ungated": (
        "apertus", "arcee", "biogpt", "bloom", "codegen", "falcon", "-falcon_h1", "fuyu", "gpt", "-gpt_oss", "jais2", "mpt",
        "nanochat", "nemotron", "openai-gpt", "opt", "persimmon", "phi", "-phi3", "-phi4", "-phimoe", "starcoder2", "xglm",
    ),
    "own gate": ("gpt_oss",),
    # experts of a width that the dense width must not stand for; a shared expert, as wide as a routed expert, that no field
    # names
    "own expert width": ("deepseek", "qwen2_moe", "qwen3", "glm4", "dots1", "ernie4_5_moe", "kimi"),
    "shared as routed": ("llama4",),
    # dense layers beside the experts of every layer; four times as wide as the model unless a field gives the width; a field
    # that holds the width of gate and up together
    "dense beside": ("longcat",),
    "four times": ("bloom", "codegen", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "mpt", "openai-gpt"),
    "half": ("moshi", "recurrent_gemma"),
    # models that only encode and have none of the fields of `_encodes`
    "encoder": (
        "aimv2", "beit", "bert", "clip", "distilbert", "esm", "eurobert", "groupvit", "modernbert", "-modernbert-decoder",
        "mpnet", "owlv", "siglip", "tipsv2", "videoprism", "xclip",
    ),
}  # fmt: skip
"""Trait -> beginnings of the model types that have it; the longest beginning decides, and `-` excepts types."""
_OF_ENCODERS = (
    "type_vocab_size", "projection_dim", "projection_size", "logit_scale_init_value", "num_mel_bins", "feat_extract_norm",
)  # fmt: skip
"""Fields that only encoders of texts, of sounds, and of pictures beside texts have."""
_OF_SIGNALS = (
    "image_size", "patch_size", "num_channels", "in_channels", "patch_length", "conv_kernel_size", "max_source_positions",
)  # fmt: skip
"""Fields of models of pictures, sounds and series; a language model that has them, such as Fuyu, also has a vocabulary."""
_RECURRENT = ("linear_num", "mamba_", "ssm_", "lru_", "conv_L_cache", "conv_dim")
"""Beginnings of fields that tell of layers without attention."""
_DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "half": "float16", "float32": "float32", "float": "float32"}


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of a layer.

    Attributes:
        count, width, top_k: experts, their inner size, and how many serve a token.
        count_field, width_field: where the file says so.
        shared: inner size of the shared experts together, 0 for none.
    """

    count: int
    width: int
    top_k: int
    count_field: str
    width_field: str
    shared: int = 0


@dataclass(frozen=True, slots=True)
class Model:
    """The layers that operators see.

    Attributes:
        path: path of the file, which errors name.
        kind: the file's `model_type`.
        hidden: width of the model.
        read_as: the sizes that were read, so that a reader who knows the model can check them.
        norms: name, rows of a token and width of each RMSNorm; empty where norms are no RMSNorm.
        projections: name -> (outputs, inputs) of every product of attention, dense layers and shared experts.
        experts: the routed experts, or None.
        zero_centered: whether weights of norms are added to 1.
        gated: whether there is a gate beside up.
        has_swiglu: whether the gate is SwiGLU.
        has_recurrence: whether some layers have no attention but a state.
        dtype: type of the weights.
    """

    path: Path
    kind: str
    hidden: int
    read_as: str
    norms: Sequence[tuple[str, int, int]]
    projections: Mapping[str, tuple[int, int]]
    experts: Experts | None
    zero_centered: bool
    gated: bool
    has_swiglu: bool
    has_recurrence: bool
    dtype: str


_Layers = tuple[str, list[tuple[str, int, int]], dict[str, tuple[int, int]]]
"""Words for `Model.read_as`, and items of `Model.norms` and `Model.projections`."""


def read(path: Path) -> Model:
    """Return the model that a `config.json` describes."""
    fields = _Fields(path, *_inner(_loaded(path)))
    if encodes := _encodes(fields):
        fields.fail("model_type", fields.kind, f"a language model that writes text, not {encodes}")
    hidden, gated = fields.size(_HIDDEN), not fields.has("ungated")
    heads, norms, projections = _attention(fields, hidden)
    experts = _experts(fields)
    mlp = _dense_width(fields, experts)
    for layer, width in (("mlp", mlp), ("shared-experts", experts.shared if experts else 0)):
        projections |= _feed_forward(fields, layer, width, hidden, gated)
    if (fields.name_of(_RMS) is None and not fields.has("rms")) or fields.has("layer norm"):
        norms = []
    has_recurrence = any(name.startswith(_RECURRENT) for name in fields.data)
    activation = fields.get("hidden_act") or fields.get("hidden_activation") or "silu"
    parts = (
        f"width {hidden}", heads, mlp and f"{'gated' if gated else 'plain'} layers of {mlp}",
        experts and f"{experts.count} experts of {experts.width}, {experts.top_k} a token",
        "RMSNorm" if norms else "norms that are no RMSNorm and have no cases",
        has_recurrence and "other layers than attention have no cases",
    )  # fmt: skip
    return Model(
        path,
        fields.kind,
        hidden,
        "; ".join(part for part in parts if part),
        norms,
        projections,
        experts,
        zero_centered=fields.has("zero-centered"),
        gated=gated,
        has_swiglu=gated and activation in ("silu", "swish") and not fields.has("own gate"),
        has_recurrence=has_recurrence,
        dtype=_DTYPES.get(str(fields.get("dtype") or fields.get("torch_dtype")).removeprefix("torch."), "bfloat16"),
    )


def _encodes(fields: "_Fields") -> str:
    """Return `an encoder` or `an encoder and a decoder`, with the field that tells; empty for a model that only writes text."""
    if fields.get("is_encoder_decoder") is True:
        return "an encoder and a decoder"
    has_vocabulary = any(name.endswith("vocab_size") for name in fields.data)
    field = fields.name_of(_OF_ENCODERS if has_vocabulary else _OF_ENCODERS + _OF_SIGNALS)
    if field is None and not fields.has("encoder") and not fields.kind.endswith("encoder"):
        return ""
    return f"an encoder{f', as it has {field}' if field else ''}"


def _loaded(path: Path) -> dict[str, Any]:
    path = path / "config.json" if os.path.isdir(path) else path
    text = read_text(path, _MOST_BYTES)
    try:
        data = json.loads(text)  # msgspec refuses Infinity, which some files have
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:120]
        raise ValueError(f"{path}: JSON: {what}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path}: JSON: expected an object, got {type(data).__name__}")
    return data


def _inner(data: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the fields of the text model, and whether they are a part of a composite model's file."""
    for depth in range(3):
        inner = next((data[name] for name in _INNER if isinstance(data.get(name), dict) and _describes(data[name])), None)
        if inner is None:
            parts = [data[name] for name in _PARTS if isinstance(data.get(name), dict)]
            return {name: value for part in parts for name, value in part.items() if name != "model_type"} | data, depth > 0
        outer: dict[str, Any] = {name: data[name] for name in _OF_ALL_PARTS if name in data}
        data = outer | inner
    return data, True


def _describes(data: Mapping[str, Any]) -> bool:
    return any(name in data for name in (*_HIDDEN, *_HEADS, *_INNER[:4], "model_type"))


class _Fields:
    """Hold the fields of a file.

    The file of a composite model leaves out sizes of its text model that are the defaults of the model's class, which come
    from transformers, if it is installed. Any other file names all sizes.
    """

    def __init__(self, path: Path, data: Mapping[str, Any], is_part: bool) -> None:
        self.path, self.data, self.is_part = path, data, is_part
        kind = data.get("model_type")
        self.kind = kind.lower() if isinstance(kind, str) else ""
        self._defaults: Mapping[str, Any] | None = None

    def get(self, name: str) -> Any:
        return self.data.get(name)

    def has(self, trait: str) -> bool:
        """Return whether the model's type has a trait."""
        begins = [begin for begin in _TRAITS[trait] if self.kind.startswith(begin.removeprefix("-"))]
        return bool(begins) and not max(begins, key=lambda begin: len(begin.removeprefix("-"))).startswith("-")

    def name_of(self, names: tuple[str, ...]) -> str | None:
        """Return the first of the names that the file has a value for; None without one."""
        return next((name for name in names if self.data.get(name) is not None), None)

    def size(self, names: tuple[str, ...], default: int | None = None) -> int:
        name = self.name_of(names)
        if name is not None:
            return self.checked(name, self.data[name])
        # transformers, whose import takes seconds, is asked only if the file and the caller give no size
        known: Mapping[str, Any] = {}
        if self.is_part:
            known = self._defaults or {} if default is not None else self.defaults
        value = next((known[name] for name in names if known.get(name) is not None), default)
        if value is None:
            kind = f"{self.kind!r}" if self.kind else "missing"
            told = f"{self.path}: {names[0]}: missing: looked for {', '.join(names)}"
            why = "incomplete" if self.defaults else "an unknown architecture"
            raise ValueError(f"{told} (model_type: {kind}: {why})")
        return int(value)

    def checked(self, name: str, value: Any) -> int:
        if type(value) is not int or not 0 < value <= _MOST_SIZE:
            self.fail(name, value, f"an integer from 1 to {_MOST_SIZE}")
        return int(value)

    def fail(self, name: str, value: Any, expected: str) -> NoReturn:
        try:
            shown = repr(value)[:60]
        except ValueError:  # an integer of more digits than Python prints
            shown = "a number of very many digits"
        raise ValueError(f"{self.path}: {name}: {shown}: expected {expected}")

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Return the default sizes of the model's class; empty without transformers."""
        if self._defaults is None:
            self._defaults = _of_class(self.kind)
        return self._defaults


def _of_class(kind: str) -> dict[str, int]:
    try:
        from transformers import CONFIG_MAPPING

        made = CONFIG_MAPPING[kind]()
        known = made.to_dict()  # attributes that differ between layers raise an error
        known |= {name: known.get(other) for name, other in made.attribute_map.items()}
    except Exception:  # transformers is not installed, does not know the type, or cannot make a config of nothing
        return {}
    names = (*_HIDDEN, *_HEADS, *_KV_HEADS, *_HEAD_DIM, *_MLP, *_EXPERT_MLP)
    return {name: known[name] for name in names if type(known.get(name)) is int and known[name] > 0}


def _experts(fields: _Fields) -> Experts | None:
    counted = fields.name_of(_EXPERTS)
    if counted is None and fields.kind.endswith("_moe"):
        raise ValueError(f"{fields.path}: {_EXPERTS[0]}: missing in a {fields.kind}: looked for {', '.join(_EXPERTS)}")
    if counted is None or _first(fields.get(counted)) in (0, 1) or fields.get("is_moe") is False:
        return None
    count = fields.checked(counted, _first(fields.get(counted)))
    wide = fields.name_of(_EXPERT_MLP) or (None if _has_expert_width(fields) else fields.name_of(_MLP))
    width = fields.size(_EXPERT_MLP) if wide is None else fields.checked(wide, _first(fields.get(wide)))
    top = fields.name_of(_TOP_K)
    if top is None:
        raise ValueError(f"{fields.path}: {_TOP_K[0]}: missing: looked for {', '.join(_TOP_K)}")
    top_k = fields.checked(top, _first(fields.get(top)))
    if top_k > count:
        fields.fail(top, top_k, f"at most the {count} experts of {counted}")
    shared = fields.name_of(_SHARED)
    several = _first(fields.get(fields.name_of(_SHARED_COUNT) or "")) or 0
    inner = fields.checked(shared, fields.get(shared)) if shared and fields.get(shared) else 0
    if not inner and several:
        inner = width * fields.checked(fields.name_of(_SHARED_COUNT) or "", several)
    if not inner and fields.has("shared as routed"):
        inner = width
    return Experts(count, width, top_k, counted, wide or _EXPERT_MLP[0], inner)


def _has_expert_width(fields: _Fields) -> bool:
    """Return whether the model's class has a field for the width of its experts, so that the dense width is not the experts'."""
    return fields.has("own expert width") or any(name in fields.defaults for name in _EXPERT_MLP)


def _first(value: Any) -> Any:
    """Return the first of a value that some models give for every layer."""
    return value[0] if isinstance(value, list) and value else value


def _dense_width(fields: _Fields, experts: Experts | None) -> int:
    """Return the inner size of dense layers; 0 where every layer has experts of that very field."""
    name = fields.name_of(_MLP)
    if experts is None:
        if name is None and ("n_inner" in fields.data or fields.has("four times")):
            return 4 * fields.size(_HIDDEN)
        width = fields.checked(name, _first(fields.get(name))) if name else fields.size(_MLP)
        return _adjusted(fields, width // 2 if fields.has("half") else width)
    of_some = ("first_k_dense_replace", "mlp_only_layers", "num_dense_layers", "moe_layer_start_index")
    steps = [fields.get(one) or 1 for one in ("expert_layer_period", "interleave_moe_layer_step")]
    listed = fields.get("mlp_layer_types")
    by_layer = isinstance(listed, list) and "dense" in listed
    has_dense = by_layer or any(fields.get(one) for one in of_some) or steps != [1, 1] or fields.has("dense beside")
    if name is None or not has_dense:
        return 0
    own = "intermediate_size_mlp" if fields.get("intermediate_size_mlp") else name
    return fields.checked(own, _first(fields.get(own)))


def _other_heads(fields: _Fields, head_dim: int, kv_heads: int) -> tuple[int, int] | tuple[()]:
    """Return (head_dim, kv_heads) of the first layers that differ, as Gemma 4 has them; nothing if all layers are equal."""
    layers = fields.get("per_layer_config")
    listed = [layer for layer in layers.values() if isinstance(layer, dict)] if isinstance(layers, dict) else []
    names = {"head_dim": fields.get("global_head_dim"), "num_key_value_heads": fields.get("num_global_key_value_heads")}
    for layer in (*listed, names):
        given = {name: fields.checked(name, layer[name]) for name in names if layer.get(name) is not None}
        other = (given.get("head_dim", head_dim), given.get("num_key_value_heads", kv_heads))
        if other != (head_dim, kv_heads):
            return other
    return ()


def _adjusted(fields: _Fields, width: int) -> int:
    """Return the inner size that LFM2 computes from the size in its file: two thirds, rounded up."""
    if fields.get("block_auto_adjust_ff_dim") is not True:
        return width
    factor, step = fields.get("block_ffn_dim_multiplier"), fields.size(("block_multiple_of",), 256)
    if type(factor) not in (int, float, type(None)) or not 0 < (factor or 1) <= 64:
        fields.fail("block_ffn_dim_multiplier", factor, "a factor above 0, 64 at most")
    return -(-int((factor or 1) * int(2 * width / 3)) // step) * step


def _attention(fields: _Fields, hidden: int) -> _Layers:
    """Return what attention adds to a model: words for `read_as`, norms, and projections; the norm of the width is among them."""
    heads = fields.size(_HEADS)
    shares_keys = fields.get("multi_query") is True and not fields.get("new_decoder_architecture")
    kv_heads = 1 if shares_keys else fields.size(_KV_HEADS, heads)
    if heads % kv_heads:
        fields.fail(_KV_HEADS[0], kv_heads, f"a divisor of {heads} attention heads")
    if fields.get("kv_lora_rank"):
        return _latent_attention(fields, hidden, heads)
    head_dim = fields.size(_HEAD_DIM, max(1, hidden // heads))
    if head_dim * heads != hidden and fields.size(_HEAD_DIM, 0) == 0:
        fields.fail(fields.name_of(_HEADS) or _HEADS[0], heads, f"a divisor of the width {hidden}, or head_dim beside it")
    value_dim, q_rank = fields.size(("v_head_dim",), head_dim), fields.get("q_lora_rank")
    has_latents = bool(q_rank and fields.get("o_lora_rank"))
    other = () if has_latents else _other_heads(fields, head_dim, kv_heads)
    norms, shapes = [("norm", 1, hidden)], dict[str, tuple[int, int]]()
    for prefix, dim, count, of_value in [("", head_dim, kv_heads, value_dim), *([("other-", *other, other[0])] if other else [])]:
        sizes = {"q": heads * dim, "k": count * dim, "v": count * of_value}
        sizes = {"qkv": sum(sizes.values())} if fields.has("fused attention") else sizes
        shapes |= {f"{prefix}attention.{name}": (size, hidden) for name, size in sizes.items()}
        shapes[f"{prefix}attention.o"] = (hidden, heads * of_value)
        if not has_latents and _has_head_norms(fields):
            norms += [(f"{prefix}q-norm", heads, dim), (f"{prefix}k-norm", count, dim)]
    if has_latents:
        q_rank, groups = fields.size(("q_lora_rank",)), fields.size(("o_groups",), 1)
        inner = groups * fields.size(("o_lora_rank",))
        shapes |= {"attention.q-down": (q_rank, hidden), "attention.q": (heads * head_dim, q_rank)}
        shapes |= {"attention.o-down": (inner, heads * value_dim // groups), "attention.o": (hidden, inner)}
        return f"{heads} heads with latents", [*norms, ("kv-norm", 1, head_dim), ("q-latent-norm", 1, q_rank)], shapes
    if fields.has("wide norms"):
        norms += [("q-norm", 1, heads * head_dim), ("k-norm", 1, kv_heads * head_dim)]
    return f"{heads} heads of {head_dim}, {kv_heads} of keys and values", norms, shapes


def _has_head_norms(fields: _Fields) -> bool:
    """Return whether queries and keys are normalized head by head."""
    said = fields.get("use_qk_norm")
    return not fields.has("wide norms") and (fields.has("head norms") if said is None else bool(said))


def _latent_attention(fields: _Fields, hidden: int, heads: int) -> _Layers:
    """Return what attention with latents of keys and values adds to a model, as `_attention` does."""
    rank, value = fields.size(("kv_lora_rank",)), fields.size(("v_head_dim",))
    rope, nope = (0 if fields.get(n) == 0 else fields.size((n,)) for n in ("qk_rope_head_dim", "qk_nope_head_dim"))
    shapes, norms, query = {"q": (heads * (nope + rope), hidden)}, [("norm", 1, hidden)], fields.get("q_lora_rank")
    if query:
        query = fields.size(("q_lora_rank",))
        shapes = {"q-down": (query, hidden), "q-up": (heads * (nope + rope), query)}
        norms += [("q-latent-norm", 1, query)]
    shapes |= {"kv-down": (rank + rope, hidden), "kv-up": (heads * (nope + value), rank), "o": (hidden, heads * value)}
    named = {f"attention.{name}": size for name, size in shapes.items()}
    return f"{heads} heads with latents", [*norms, ("kv-latent-norm", 1, rank)], named


def _feed_forward(fields: _Fields, layer: str, width: int, hidden: int, gated: bool) -> dict[str, tuple[int, int]]:
    """Return the projections of a dense layer of a width; none of a width of 0."""
    if not width:
        return {}
    up = {"up": width} if not gated else {"gate-up": 2 * width} if fields.has("fused mlp") else {"gate": width, "up": width}
    return {f"{layer}.{name}": (size, hidden) for name, size in up.items()} | {f"{layer}.down": (hidden, width)}
