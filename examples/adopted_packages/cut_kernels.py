"""Cut the kernel modules of vLLM, SGLang and Unsloth out of their archives, to import them without other dependencies.

    pip download --no-deps unsloth unsloth_zoo
    python cut_kernels.py unsloth-2026.10.9-py3-none-any.whl unsloth_zoo-2026.10.9-py3-none-any.whl
    python cut_kernels.py vllm-0.33.0.tar.gz sglang-0.5.23-cp311-cp311-manylinux_2_34_x86_64.whl

Writes the folder `cut` beside this file: modules as the archive has them, and stubs in place of the modules that they import and
that their kernels do not use. An archive is a wheel, an sdist or an unpacked sdist.
"""

import io
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CUT = Path(__file__).resolve().with_name("cut")
KEPT = (
    "vllm/envs.py", "vllm/triton_utils/[!i]*.py", "vllm/utils/math_utils.py",
    "vllm/model_executor/layers/mamba/ops/*.py", "vllm/model_executor/layers/mamba/ops/configs/*/*NVIDIA_H[12]00*.json",
    "vllm/model_executor/layers/quantization/utils/fp8_utils.py",
    "vllm/model_executor/layers/quantization/utils/configs/*NVIDIA_H[12]00*.json",
    "vllm/model_executor/layers/fused_moe/fused_moe.py", "vllm/model_executor/layers/fused_moe/configs/*NVIDIA_H[12]00*.json",
    "vllm/v1/attention/ops/triton_[admpr]*.py", "vllm/v1/attention/ops/triton_unified_attention.py",
    "vllm/lora/ops/triton_ops/lora_[!_]*.py", *(f"vllm/lora/ops/triton_ops/{name}.py" for name in ("kernel_utils", "utils")),
    *(f"sglang/kernels/ops/attention/{name}.py" for name in ("decode_attention", "extend_attention", "score_mod")),
    *(f"sglang/kernels/ops/lora/dense/{name}.py" for name in ("kernel_utils", "qkv_lora_b", "sgemm_lora_a")),
    "unsloth/kernels/[!_]*.py", "unsloth/device_type.py", "unsloth/bnb_availability.py",
    "unsloth_zoo/utils.py", "unsloth_zoo/log.py",
)  # fmt: skip
SUFFIXES = (".py", ".json")
ANYTHING = '''"""Stand in for a module that kernels do not use."""


class Anything:
    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) else self  # a decorator leaves its function

    def __getattr__(self, name):
        if name.startswith("_") or name in ("fn", "func"):  # the object wraps no function
            raise AttributeError(name)
        return self

    def __or__(self, other):  # in annotations
        return self


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything()
'''
PLATFORM = '''"""Stand in for vLLM's platforms: an NVIDIA GPU, or Triton's interpreter."""

import functools

import torch


@functools.cache
def _capability():
    try:  # torch would start CUDA in each process that compiles
        import pynvml

        pynvml.nvmlInit()
        return tuple(pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByIndex(0)))
    except Exception:  # no GPU
        return (0, 0)


class _Platform:
    is_cpu = is_xpu = is_rocm = lambda self: False
    fp8_dtype = lambda self: torch.float8_e4m3fn

    def is_cuda(self):
        return _capability()[0] > 0

    is_cuda_alike = is_cuda

    def has_device_capability(self, capability):
        return _capability() >= divmod(capability, 10)

    def is_device_capability(self, capability):
        return _capability() == divmod(capability, 10)

    def is_device_capability_family(self, capability):
        return _capability()[0] == capability // 10

    def is_arch_support_pdl(self):
        return _capability()[0] >= 9


current_platform = _Platform()
vllm_version_matches_substr = lambda text: False
'''
DEVICE_NAME = '''"""Name GPUs as vLLM's tables of configs do."""

import torch


def get_device_name_as_file_name(number=0):
    return torch.cuda.get_device_name(number).replace(" ", "_") if torch.cuda.is_available() else "none"
'''
TORCH_UTILS = """

import torch


def async_tensor_h2d(data, device, dtype):
    return torch.tensor(data, dtype=dtype, device=device)
"""
QUANT_UTILS = """

import torch

FP8_DTYPE = torch.float8_e4m3fn
get_fp8_min_max = lambda: (-448.0, 448.0)
"""
CACHE_MODES = '''"""Name how a KV cache is quantized, as vLLM does."""

import enum

is_quantized_kv_cache = lambda name: name.startswith("fp8")


class KVQuantMode(enum.IntEnum):
    NONE, FP8_PER_TENSOR, INT8_PER_TOKEN_HEAD, FP8_PER_TOKEN_HEAD, INT4_PER_TOKEN_HEAD = range(5)
'''
SGLANG_UTILS = '''"""Stand in for SGLang's utilities: an NVIDIA GPU, or Triton's interpreter."""

import torch

is_cuda = torch.cuda.is_available
is_hip = is_gfx95_supported = is_gfx1250_supported = lambda: False
get_device_core_count = lambda number=0: torch.cuda.get_device_properties(number).multi_processor_count
'''
MOE_UTILS = """

from vllm.platforms import current_platform

resolve_moe_use_td = lambda: False
warn_if_moe_use_td_ineffective = lambda *_, **__: None


def enable_swap_ab(rows, columns):
    return current_platform.is_device_capability(90) and rows < 64 and columns >= 64
"""
STUBS = {
    "vllm": {
        "vllm/utils/platform_utils.py": DEVICE_NAME,
        "vllm/triton_utils/importing.py": "HAS_TRITON = True\nTritonPlaceholder = TritonLanguagePlaceholder = None\n",
        "vllm/platforms.py": PLATFORM,
        "vllm/v1/attention/backends/utils.py": "PAD_SLOT_ID = -1\nNULL_BLOCK_ID = 0\n",
        "vllm/model_executor/layers/fused_moe/__init__.py": "def get_config():\n    return None\n",
        **{f"vllm/{name}.py": ANYTHING for name in ("logger", "_custom_ops", "utils/deep_gemm")},
        "vllm/utils/torch_utils.py": ANYTHING + TORCH_UTILS,
        "vllm/v1/kv_cache_interface.py": CACHE_MODES,
        "vllm/model_executor/layers/quantization/utils/quant_utils.py": ANYTHING + QUANT_UTILS,
        **{
            f"vllm/model_executor/{name}.py": ANYTHING
            for name in ("layers/quantization/utils/w8a8_utils", "parameter", "utils")
        },
        **{
            f"vllm/model_executor/layers/fused_moe/{name}.py": ANYTHING
            for name in ("activation", "config", "modular_kernel", "moe_align_block_size")
        },
        "vllm/model_executor/layers/fused_moe/utils.py": ANYTHING
        + MOE_UTILS,
    },
    "sglang": {
        "sglang/srt/utils.py": SGLANG_UTILS,
        **{f"sglang/srt/{name}.py": ANYTHING for name in ("environ", "lora/utils")},
    },
    "unsloth": dict.fromkeys(
        (
            "unsloth_zoo/temporary_patches/common.py", "unsloth_zoo/patching_utils.py", "unsloth_zoo/loss_utils.py",
            "transformers/models/llama/modeling_llama.py",
        ),
        ANYTHING,
    ),
}  # fmt: skip


def files(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the path in the package, and the content, of each file of an archive."""
    if archive.is_dir():
        found = [path for path in archive.rglob("*") if path.suffix in SUFFIXES]
        yield from ((str(path.relative_to(archive)), path.read_bytes()) for path in found)
    elif zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist())
    else:
        with tarfile.open(fileobj=io.BytesIO(archive.read_bytes())) as sdist:
            for member in sdist.getmembers():
                if member.isfile() and member.name.endswith(SUFFIXES):
                    yield member.name.partition("/")[2], sdist.extractfile(member).read()  # type: ignore[union-attr]


def write(name: str, content: bytes) -> None:
    """Write a file of the folder."""
    path = CUT / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def main(*archives: str) -> None:
    """Cut each archive."""
    for archive in map(Path, archives):
        kept = {name: content for name, content in files(archive) if any(map(PurePosixPath(name).match, KEPT))}
        if not kept:
            sys.exit(f"{archive}: no kernel module of vLLM, SGLang or Unsloth in it")
        packages = [each for package, each in STUBS.items() if any(name.startswith(package) for name in kept)]
        stubs = {name: text.encode() for each in packages for name, text in each.items()}
        for name, content in (stubs | kept).items():
            write(name, content)
        print(f"{archive.name}: {len(kept)} files, {sum(map(len, kept.values())) / 1e3:.0f} KB, and {len(stubs)} stubs in {CUT}")


if __name__ == "__main__":
    main(*sys.argv[1:])
