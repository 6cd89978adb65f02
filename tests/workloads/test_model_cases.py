"""The sweep of a model: sizes read from its config.json, cases named by layer, and bad files in one line."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from kerneltune import ops, sweep_file
from kerneltune.workloads.model_cases import model_sweep_text
from kerneltune.workloads.model_config import Model, read

OPS = ops.load()
SMALL = {"model_type": "qwen3", "hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
         "intermediate_size": 9728, "rms_norm_eps": 1e-6}  # fmt: skip
EXPERTS = {**SMALL, "model_type": "qwen3_moe", "num_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408}
LATENT = {**EXPERTS, "model_type": "deepseek_v3", "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
          "qk_nope_head_dim": 128, "v_head_dim": 128, "n_shared_experts": 2, "first_k_dense_replace": 1}  # fmt: skip


def written(folder: Path, fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(fields if isinstance(fields, str) else json.dumps(fields))
    return path


def cases(folder: Path, fields: dict[str, Any], ep: int = 1) -> dict[tuple[str, str], dict[str, Any]]:
    (folder / "made.yaml").write_text(model_sweep_text(read(written(folder, fields)), [4096], [1, 16], ep))
    loaded = sweep_file.load(folder / "made.yaml", OPS)
    return {(e.op, e.case.name): {**dict(e.case.axes), **dict(e.case.options), "dtype": e.case.dtype} for e in loaded.bench}


def test_cases_of_a_dense_model_have_its_norms_and_each_projection(tmp_path: Path) -> None:
    sizes_of = cases(tmp_path, SMALL)
    assert sizes_of["rmsnorm_bwd", "q-norm-131072"] == {"M": 131072, "N": 128, "zero_centered": False, "dtype": "bfloat16"}
    assert sizes_of["rmsnorm_fwd", "k-norm-32768"]["N"] == 128
    assert sizes_of["rmsnorm_fwd", "norm-4096"]["N"] == 2560
    projections = {
        name: (sizes["M"], sizes["K"]) for (op, name), sizes in sizes_of.items() if op == "int4_gemm" and sizes["N"] == 16
    }
    assert projections == {
        "attention.q-16": (4096, 2560), "attention.k+attention.v-16": (1024, 2560), "attention.o-16": (2560, 4096),
        "mlp.gate+mlp.up-16": (9728, 2560), "mlp.down-16": (2560, 9728),
    }  # fmt: skip
    assert {op for op, _ in sizes_of} == {"rmsnorm_fwd", "rmsnorm_bwd", "int4_gemm"}


def test_cases_of_experts_have_the_products_of_both_passes_on_one_gpu_of_the_group(tmp_path: Path) -> None:
    sizes_of = cases(tmp_path, {**EXPERTS, "torch_dtype": "float16"}, ep=8)
    rows = 4096 * 6
    products = {name: sizes for (op, name), sizes in sizes_of.items() if op == "fp8_grouped_gemm"}
    assert {sizes["E"] for sizes in products.values()} == {8}
    assert len(products) == 6
    assert {sizes["dtype"] for sizes in products.values()} == {"float16"}
    sizes = {name: (s["M"], s["N"], s["K"], s["product"]) for name, s in products.items()}
    assert sizes[f"experts.gate-up-{rows}"] == (rows, 2816, 2560, "rows")
    assert sizes[f"experts.gate-up.dgrad-{rows}"] == (rows, 2560, 2816, "rows")
    assert sizes[f"experts.down.wgrad-{rows}"] == (rows, 2560, 1408, "weights")
    assert sizes_of["fp8_rowwise_3d_both", "experts.gate-up.weight-8"]["N"] == 2816
    assert sizes_of["fp8_tensorwise_2d", f"experts.gate-up.dy-{rows}"]["layout"] == "both"
    copied, gated = sizes_of["moe_permute_fp8", "experts.copy-4096"], sizes_of["fp8_swiglu_bwd_2d", f"experts.swiglu.dx-{rows}"]
    assert (copied["T"], copied["H"], copied["E"], copied["K"]) == (4096, 2560, 8, 6)
    assert (gated["M"], gated["N"], gated["G"]) == (rows, 1408, 8)
    assert sizes_of["moe_unpermute", "experts.copy.dx-4096"]["weighted"] is False
    for (op, _), sizes in sizes_of.items():
        assert set(sizes) >= set(OPS[op].axes)


def test_cases_of_experts_without_swiglu_lack_swiglu_and_routing_operators(tmp_path: Path) -> None:
    op_names = {op for op, _ in cases(tmp_path, {**EXPERTS, "hidden_act": "gelu"}, ep=16)}
    assert not [op for op in op_names if op.startswith(("moe_", "fp8_swiglu"))]
    assert "fp8_grouped_gemm" in op_names


def test_cases_of_latent_attention_have_its_norms_and_shared_experts(tmp_path: Path) -> None:
    sizes_of = cases(tmp_path, LATENT)
    assert sizes_of["rmsnorm_fwd", "kv-latent-norm-4096"]["N"] == 512
    assert sizes_of["rmsnorm_fwd", "q-latent-norm-4096"]["N"] == 1536
    assert sizes_of["int4_gemm", "attention.kv-down-1"]["M"] == 576
    assert sizes_of["int4_gemm", "shared-experts.down-1"]["K"] == 2816
    assert sizes_of["int4_gemm", "mlp.down-1"]["K"] == 9728
    assert not any("q-norm" in name for _, name in sizes_of)


def test_model_sweep_file_begins_with_the_sizes_read(tmp_path: Path) -> None:
    head = model_sweep_text(read(written(tmp_path, EXPERTS)), [4096], [1]).splitlines()[1]
    assert head == "# Read as width 2560; 32 heads of 128, 8 of keys and values; 64 experts of 1408, 6 a token; RMSNorm."


def test_cases_of_a_model_with_layer_norm_have_no_rms_norm(tmp_path: Path) -> None:
    fields = {key: value for key, value in SMALL.items() if key != "rms_norm_eps"} | {
        "model_type": "cohere2",
        "layer_norm_eps": 1e-5,
    }
    assert {op for op, _ in cases(tmp_path, fields)} == {"int4_gemm"}


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("qwén", "qw-n-2560"), ("a family: b", "a-family-b-2560"), ("new\nops: [x]", "new-ops-x-2560"), ("  ", "model-2560"),
        ("\ud800", "model-2560"), ("../x", "x-2560"), ("q" * 100, f"{'q' * 70}-2560"),
    ],
)  # fmt: skip
def test_family_of_a_model_type_with_other_characters_is_a_plain_name(tmp_path: Path, kind: str, family: str) -> None:
    text = model_sweep_text(read(written(tmp_path, {**SMALL, "model_type": kind})), [4096], [1])
    (tmp_path / "made.yaml").write_text(text)
    assert sweep_file.load(tmp_path / "made.yaml", OPS).family == family
    assert text.splitlines()[2] == f"family: {family}"


@pytest.mark.parametrize("kind", ["llama", "mixtral", "deepseek_v3", "qwen3_moe", "gpt_oss"])
def test_norms_of_a_type_with_rms_norm_are_read_without_an_epsilon_field(tmp_path: Path, kind: str) -> None:
    fields = {key: value for key, value in EXPERTS.items() if key != "rms_norm_eps"} | {"model_type": kind}
    assert read(written(tmp_path, fields)).norms


def test_cases_of_an_unknown_type_come_from_its_fields_or_its_text_config(tmp_path: Path) -> None:
    sizes_of = cases(tmp_path, {"model_type": "new_vl", "vision_config": {}, "text_config": {**SMALL, "model_type": "new_text"}})
    assert sizes_of["rmsnorm_fwd", "norm-4096"]["N"] == 2560
    assert ("rmsnorm_fwd", "q-norm-131072") not in sizes_of
    assert cases(tmp_path, {**SMALL, "model_type": "gemma3_text"})["rmsnorm_fwd", "norm-4096"]["zero_centered"] is True


def test_sizes_of_gpt2_and_dbrx_are_read_from_their_own_fields(tmp_path: Path) -> None:
    small = read(written(tmp_path, {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_inner": None}))
    assert small.projections["mlp.down"] == (768, 3072)
    assert read(written(tmp_path, {"model_type": "gpt2", "n_embd": 1024, "n_head": 16})).projections["mlp.down"] == (1024, 4096)
    ffn = {"model_type": "", "ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}
    fields = {"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "attn_config": {"kv_n_heads": 8}, "ffn_config": ffn}
    large = read(written(tmp_path, fields))
    assert large.experts is not None
    assert large.projections == {"attention.qkv": ((48 + 2 * 8) * 128, 6144), "attention.o": (6144, 6144)}
    assert (large.kind, large.experts.count, large.experts.top_k, large.experts.width) == ("dbrx", 16, 4, 10752)


def test_layers_of_model_families_are_those_of_their_code(tmp_path: Path) -> None:
    """Names and sizes are of the models' own files; the parts of a layer are as in transformers 5."""

    def model(kind: str, **fields: Any) -> Model:
        base = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}
        return read(written(tmp_path, {**base, "model_type": kind, **fields}))

    def mlp(read_as: Model) -> int:
        """Return the width of dense layers."""
        return read_as.projections["mlp.down"][1] if "mlp.down" in read_as.projections else 0

    hunyuan = model("hunyuan_v1_moe", intermediate_size=3072, num_experts=64, moe_topk=[8] * 32, num_shared_expert=[1] * 32,
                    moe_intermediate_size=[3072] * 32, use_qk_norm=True)  # fmt: skip
    assert hunyuan.experts is not None
    assert (hunyuan.experts.count, hunyuan.experts.top_k, hunyuan.experts.shared) == (64, 8, 3072)
    assert hunyuan.norms == [("norm", 1, 4096), ("q-norm", 32, 128), ("k-norm", 8, 128)]
    ernie = model("ernie4_5_moe", intermediate_size=12288, moe_num_experts=[64, 64], moe_k=6, moe_num_shared_experts=2,
                  moe_intermediate_size=[1536, 512], moe_layer_start_index=1)  # fmt: skip
    assert ernie.experts is not None
    assert (mlp(ernie), ernie.experts.count, ernie.experts.width, ernie.experts.shared) == (12288, 64, 1536, 3072)
    routed = {"intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_local_experts": 16, "num_experts_per_tok": 1}
    scout, maverick = (model("llama4_text", **routed, interleave_moe_layer_step=step) for step in (1, 2))
    assert scout.experts == maverick.experts
    assert scout.experts is not None
    assert (scout.experts.width, scout.experts.shared, mlp(scout), mlp(maverick)) == (8192, 8192, 0, 16384)
    assert "mlp.up" in model("glm4v_moe_text", intermediate_size=10944).projections
    assert "mlp.gate-up" in model("glm4", intermediate_size=13696).projections
    falcon = model("falcon_h1", intermediate_size=12288)
    assert falcon.projections.keys() >= {"mlp.gate", "attention.q"}
    assert falcon.norms
    lite = model("glm4_moe_lite", intermediate_size=10240, num_experts=64, moe_intermediate_size=1536, num_experts_per_tok=4,
                 mlp_layer_types=["dense", "sparse"])  # fmt: skip
    assert mlp(lite) == 10240
    assert mlp(model("recurrent_gemma", intermediate_size=15360)) == 7680
    assert mlp(model("lfm2", intermediate_size=12288, block_auto_adjust_ff_dim=True, block_multiple_of=256)) == 8192
    shared = model("falcon", ffn_hidden_size=18176, multi_query=True)
    assert (shared.projections["attention.qkv"], shared.gated) == (((32 + 2) * 128, 4096), False)
    several = model("falcon", ffn_hidden_size=18176, multi_query=True, new_decoder_architecture=True)
    assert several.projections["attention.qkv"] == ((32 + 2 * 8) * 128, 4096)
    assert (mlp(model("bloom")), model("gpt_neo").gated, model("gpt_oss", intermediate_size=2880).gated) == (16384, False, True)
    assert model("doge", intermediate_size=2048, num_experts=16384, num_experts_per_tok=64, is_moe=False).experts is None
    assert model("bamba", intermediate_size=14336, mamba_d_state=256).has_recurrence
    glm5 = model("glm5_next", intermediate_size=12288, head_dim=0, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=0,
                 qk_nope_head_dim=256, v_head_dim=256)  # fmt: skip
    assert (glm5.projections["attention.kv-down"], glm5.projections["attention.q-up"]) == ((512, 4096), (32 * 256, 1536))
    longcat = model("longcat_flash", ffn_hidden_size=12288, expert_ffn_hidden_size=2048, n_routed_experts=512, moe_topk=12)
    assert mlp(longcat) == 12288


def test_projections_follow_heads_per_layer_value_heads_and_low_ranks(tmp_path: Path) -> None:
    def projections(**fields: Any) -> dict[str, tuple[int, int]]:
        base = {"hidden_size": 2304, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6}
        sizes_of = cases(tmp_path, {**base, "intermediate_size": 9216, "model_type": "new", **fields})
        shapes = {name.rpartition("-")[0]: (case["M"], case["K"]) for (op, name), case in sizes_of.items() if op == "int4_gemm"}
        return {layer: shape for layers, shape in shapes.items() for layer in layers.split("+") if "attention" in layer}

    gemma = projections(model_type="gemma4_text", per_layer_config={"05": {"head_dim": 512}})
    assert gemma["attention.q"] == (2048, 2304)
    assert (gemma["other-attention.q"], gemma["other-attention.k"], gemma["other-attention.o"]) == (
        (4096, 2304), (2048, 2304), (2304, 4096),
    )  # fmt: skip
    mimo = projections(v_head_dim=128)
    assert (mimo["attention.k"], mimo["attention.v"], mimo["attention.o"]) == ((1024, 2304), (512, 2304), (2304, 1024))
    low = projections(num_key_value_heads=1, q_lora_rank=768, o_lora_rank=1024, o_groups=4)
    assert low == {
        "attention.q-down": (768, 2304), "attention.q": (2048, 768), "attention.k": (256, 2304), "attention.v": (256, 2304),
        "attention.o-down": (4096, 512), "attention.o": (2304, 4096),
    }  # fmt: skip


PICTURE = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
TEXT_BESIDE = {**PICTURE, "vocab_size": 49408, "model_type": "some_text"}


@pytest.mark.parametrize(
    ("fields", "evidence"),
    [
        ({**PICTURE, "model_type": "vit", "image_size": 224, "patch_size": 16, "num_channels": 3}, ", as it has image_size"),
        ({**PICTURE, "model_type": "never_heard_of", "patch_size": 14}, ", as it has patch_size"),
        ({**PICTURE, "model_type": "beit", "vocab_size": 8192, "image_size": 224}, ""),
        (
            {"model_type": "clip", "logit_scale_init_value": 2.6592, "text_config": TEXT_BESIDE, "vision_config": PICTURE},
            ", as it has logit_scale_init_value",
        ),
        ({"model_type": "siglip", "text_config": {**TEXT_BESIDE, "model_type": "siglip_text_model"}, "vision_config": {}}, ""),
        ({**PICTURE, "model_type": "wav2vec2", "vocab_size": 32, "feat_extract_norm": "group"}, ", as it has feat_extract_norm"),
        ({**PICTURE, "model_type": "some_sound_encoder"}, ""),
        ({**TEXT_BESIDE, "is_encoder_decoder": True}, " and a decoder"),
    ],
)
def test_config_of_an_encoder_raises_with_its_model_type(tmp_path: Path, fields: dict[str, Any], evidence: str) -> None:
    path = written(tmp_path, fields)
    with pytest.raises(ValueError) as caught:
        read(path)
    kind, expected = fields.get("text_config", fields)["model_type"], "expected a language model that writes text, not an encoder"
    assert str(caught.value) == f"{path}: model_type: '{kind}': {expected}{evidence}"


def test_config_of_a_vision_language_model_gives_its_language_model(tmp_path: Path) -> None:
    fuyu = {**SMALL, "model_type": "fuyu", "image_size": 300, "patch_size": 30, "num_channels": 3, "vocab_size": 262144}
    assert read(written(tmp_path, fuyu)).hidden == 2560
    llava = {"model_type": "llava", "text_config": SMALL, "vision_config": {**PICTURE, "image_size": 336, "projection_dim": 768}}
    assert read(written(tmp_path, llava)).hidden == 2560
    decoder = read(written(tmp_path, {**SMALL, "model_type": "modernbert-decoder", "vocab_size": 50368}))
    assert decoder.projections["mlp.gate-up"] == (2 * 9728, 2560)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ("[1]", "JSON: expected an object, got list"),
        ("{", "1: JSON: Expecting property name"),
        ({"model_type": "mystery"}, "hidden_size: missing: looked for hidden_size, n_embd, d_model, dim (model_type: 'mystery'"),
        (
            {"model_type": "t5", "d_model": 512, "num_heads": 8, "is_encoder_decoder": True},
            "model_type: 't5': expected a language model that writes text, not an encoder and a decoder",
        ),
        ({**SMALL, "hidden_size": "big"}, "hidden_size: 'big': expected an integer from 1 to"),
        ({**SMALL, "hidden_size": True}, "hidden_size: True: expected an integer"),
        (
            {**SMALL, "model_type": "mystery", "head_dim": None, "num_attention_heads": 24},
            "num_attention_heads: 24: expected a divisor of the width 2560, or head_dim beside it",
        ),
        ({**SMALL, "model_type": "modernbert"}, "model_type: 'modernbert': expected a language model that writes text"),
        (
            {**SMALL, "model_type": "ernie", "type_vocab_size": 2},
            "model_type: 'ernie': expected a language model that writes text",
        ),
        ({**SMALL, "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": "2"}, "block_ffn_dim_multiplier: '2': expected"),
        ({**SMALL, "num_key_value_heads": 7}, "num_key_value_heads: 7: expected a divisor of 32"),
        ({**EXPERTS, "num_experts_per_tok": 65}, "num_experts_per_tok: 65: expected at most the 64 experts of num_experts"),
        (
            {**EXPERTS, "model_type": "qwen3_moe", "num_experts": None},
            "num_experts: missing in a qwen3_moe: looked for num_experts, ",
        ),
        ({**EXPERTS, "num_experts_per_tok": None}, "num_experts_per_tok: missing: looked for num_experts_per_tok, "),
        ({**EXPERTS, "moe_intermediate_size": 1411}, "moe_intermediate_size: 1411: expected a multiple of 16"),
        ({**EXPERTS, "num_experts": 60}, "num_experts: 60: expected a multiple of ep=8"),
        ('{"hidden_size": ' + "9" * 400 + "}", "hidden_size: 99999"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "JSON: "),
        ("[" * 100000, "JSON: nested too deeply"),
    ],
)
def test_bad_model_config_raises_one_line_with_file_field_and_value(tmp_path: Path, fields: Any, text: str) -> None:
    path = written(tmp_path, fields)
    with pytest.raises(ValueError) as caught:
        model_sweep_text(read(path), [4096], [1], ep=8)
    assert str(caught.value).startswith(str(path))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_experts_without_a_width_have_that_of_their_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {name: value for name, value in EXPERTS.items() if name != "moe_intermediate_size"}
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(CONFIG_MAPPING={"qwen3_moe": Made, "mixtral": object}))
    experts = read(written(tmp_path, {"model_type": "some_vl", "text_config": fields})).experts
    mixtral = read(written(tmp_path, {**fields, "model_type": "mixtral"})).experts
    assert experts is not None
    assert mixtral is not None
    assert (experts.width, experts.width_field) == (768, "moe_intermediate_size")
    assert (mixtral.width, mixtral.width_field) == (9728, "intermediate_size")
    for package in (sys.modules["transformers"], None):
        monkeypatch.setitem(sys.modules, "transformers", package)
        with pytest.raises(ValueError, match=r"config.json: moe_intermediate_size: missing: looked for moe_intermediate_size, "):
            read(written(tmp_path, fields))


@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size", "num_attention_heads"])
def test_config_without_a_size_raises_though_its_class_has_a_default(tmp_path: Path, field: str) -> None:
    fields = {name: value for name, value in SMALL.items() if name != field}
    with pytest.raises(ValueError, match=f"config.json: {field}: missing: looked for {field}"):
        read(written(tmp_path, {**fields, "model_type": "llama"}))


class Made:
    """A config's class as transformers has it for Qwen3's experts."""

    attribute_map: ClassVar[dict[str, str]] = {"moe_intermediate_size": "width"}

    def to_dict(self) -> dict[str, int]:
        return {"width": 768}


def test_missing_model_config_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        read(tmp_path / "none.json")


def test_incomplete_text_config_raises_one_line(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=r"hidden_size: missing: looked for .* \(model_type: 'gemma4_text': incomplete\)$"):
        read(written(tmp_path, {"model_type": "gemma4_text", "num_attention_heads": 8}))
