"""Run kernels of serving engines: `python engine_kernels.py attention|decode|lora|sglang`, of vLLM 0.33.0 and SGLang 0.5.23.

Needs the folder that examples/adopted_packages/cut_kernels.py writes of both archives.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "adopted_packages" / "cut"))

import torch
from measured_step import BF16, DEVICE, leaf, run, sized

HEADS, KV_HEADS, WIDTH, PAGE = sized(32, 4), sized(8, 2), sized(128, 16), 16
PROMPTS = sized(1024, 40), sized(3000, 25), sized(517, 7)
BATCH, CONTEXT = sized(64, 3), sized(4096, 70)
HIDDEN, RANK, LORAS, TOKENS = sized(4096, 64), 16, 4, sized(512, 130)


@functools.cache
def values(*sizes: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Return random values of a fixed seed."""
    return leaf(*sizes, scale=scale, dtype=dtype).detach()


def whole(*numbers: int) -> torch.Tensor:
    """Return whole numbers, as indices are."""
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def starts(lengths: tuple[int, ...]) -> torch.Tensor:
    """Return the first row of each sequence, and the end of the last."""
    return whole(*(sum(lengths[:number]) for number in range(len(lengths) + 1)))


def lengths_of_contexts() -> tuple[int, ...]:
    """Return lengths of the contexts of a batch, of 1 to CONTEXT tokens."""
    return tuple(1 + (CONTEXT - 1) * number // max(BATCH - 1, 1) for number in range(BATCH))


@functools.cache
def paged(lengths: tuple[int, ...], heads: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return caches of keys and values in pages, and the pages of each sequence, in a random order."""
    most = -(-max(lengths) // PAGE)
    torch.manual_seed(3)
    table = torch.randperm(len(lengths) * most, device="cpu").reshape(len(lengths), most).int().to(DEVICE)
    return values(table.numel(), PAGE, heads, width), values(table.numel(), PAGE, heads, width, scale=0.5), table


def attention() -> Any:
    """Write prompts to a paged cache, attend in prompts and to caches, and merge two parts of an attention."""
    from vllm.v1.attention.ops.triton_merge_attn_states import merge_attn_states
    from vllm.v1.attention.ops.triton_prefill_attention import context_attention_fwd
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    rows, one = sum(PROMPTS), torch.ones(1, device=DEVICE)
    q, k, v = values(rows, HEADS, WIDTH), values(rows, KV_HEADS, WIDTH), values(rows, KV_HEADS, WIDTH, scale=0.5)
    keys, stored, table = paged(PROMPTS, KV_HEADS, WIDTH)
    first, lengths = starts(PROMPTS), whole(*PROMPTS)
    slots = torch.cat([table[n].long().repeat_interleave(PAGE)[:m] * PAGE for n, m in enumerate(PROMPTS)])
    slots += torch.cat([torch.arange(m, device=DEVICE) % PAGE for m in PROMPTS])
    if DEVICE == "cuda":  # it asks for the GPU's capability
        triton_reshape_and_cache_flash(k, v, keys, stored, slots, "auto", one, one)
    out, prompt = torch.empty_like(q), torch.empty_like(q)
    unified_attention(
        q, keys, stored, out, first, max(PROMPTS), lengths, max(PROMPTS), WIDTH**-0.5, True, (-1, -1), table, 0.0, None, one, one
    )
    context_attention_fwd(q, k, v, prompt, first, lengths, max(PROMPTS), softmax_scale=WIDTH**-0.5)
    merged = torch.empty_like(q)
    weights = [values(HEADS, rows, scale=scale, dtype=torch.float32) for scale in (1.0, 2.0)]
    merge_attn_states(merged, out, weights[0], prompt, weights[1])
    return out, prompt, merged, keys, stored


def decode() -> Any:
    """Decode a token of each sequence over a paged cache: in segments, and with the compressed cache of DeepSeek's layers."""
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    contexts, one = lengths_of_contexts(), torch.ones(1, device=DEVICE)
    lengths, parts = whole(*contexts), 16
    keys, stored, table = paged(contexts, KV_HEADS, WIDTH)
    q = values(BATCH, HEADS, WIDTH)
    out = torch.empty_like(q)
    scratch = [torch.empty(BATCH, HEADS, parts, *more, device=DEVICE) for more in ((WIDTH,), (), ())]
    unified_attention(
        q, keys, stored, out, starts((1,) * BATCH), 1, lengths, max(contexts), WIDTH**-0.5, True, (-1, -1), table, 0.0, None, one,
        one, 1 << 20, parts, *scratch,
    )  # fmt: skip
    latent, rope = sized(512, 16), sized(64, 16)
    cache, _, table = paged(contexts, 1, latent + rope)
    queries, splits = values(BATCH, sized(16, 4), latent + rope), 4
    joined = torch.empty(*queries.shape[:2], latent, dtype=BF16, device=DEVICE)
    lse = torch.empty(queries.shape[:2], dtype=BF16, device=DEVICE)
    partial = torch.empty(*queries.shape[:2], splits, latent + 1, device=DEVICE)
    decode_attention_fwd(
        queries, cache, cache[..., :latent], joined, lse, table, lengths, partial, splits, (latent + rope) ** -0.5, PAGE,
        is_mla=True,
    )  # fmt: skip
    return out, joined, lse


def lora() -> Any:
    """Add adapters to linear layers. Those of several layers in one launch are a table of addresses, which no capture holds."""
    from vllm.lora.ops.triton_ops.lora_expand_op import lora_expand
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
    from vllm.lora.ops.triton_ops.lora_shrink_op import lora_shrink

    torch.manual_seed(5)
    adapters = torch.randint(-1, LORAS, (TOKENS,), dtype=torch.int32).to(DEVICE)
    meta = LoRAKernelMeta.make(LORAS, TOKENS, DEVICE)
    meta.prepare_tensors(adapters)
    x, found = values(TOKENS, HIDDEN), []
    for width in (HIDDEN, 3 * HIDDEN):
        inner, y = torch.empty(1, TOKENS, RANK, device=DEVICE), values(TOKENS, width).clone()
        lora_shrink(x, [values(LORAS, RANK, HIDDEN, scale=0.05)], inner, *meta.meta_args(TOKENS, False), 0.5)
        lora_expand(inner, [values(LORAS, width, RANK)], y, *meta.meta_args(TOKENS, False), add_inputs=True)
        found += [inner, y]
    return found


def sglang() -> Any:
    """Decode and extend with SGLang's attention, and add its adapters to three layers that share an input."""
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
    from sglang.kernels.ops.lora.dense.qkv_lora_b import qkv_lora_b_fwd
    from sglang.kernels.ops.lora.dense.sgemm_lora_a import sgemm_lora_a_fwd

    contexts, splits = lengths_of_contexts(), 8
    first, total = starts(contexts), sum(contexts)
    torch.manual_seed(7)
    slots = torch.randperm(total, device="cpu").to(DEVICE)
    keys, stored = values(total, KV_HEADS, WIDTH), values(total, KV_HEADS, WIDTH, scale=0.5)
    q, out = values(BATCH, HEADS, WIDTH), torch.empty(BATCH, HEADS, WIDTH, dtype=BF16, device=DEVICE)
    partial = torch.empty(BATCH, HEADS, splits, WIDTH, device=DEVICE), torch.empty(BATCH, HEADS, splits, device=DEVICE)
    counts = whole(*(max(1, min(splits, length // 32)) for length in contexts))
    decode_attention_fwd(q, keys, stored, out, first, slots, *partial, counts, splits, WIDTH**-0.5, 1.0, 1.0)
    rows = sum(PROMPTS)
    new = [values(rows, heads, WIDTH, scale=scale) for heads, scale in ((HEADS, 1.0), (KV_HEADS, 1.0), (KV_HEADS, 0.5))]
    extended = torch.empty_like(new[0])
    prefix = starts(contexts[-len(PROMPTS) :])
    extend_attention_fwd(*new, extended, keys, stored, starts(PROMPTS), prefix, slots, None, True, None, max(PROMPTS), 1.0, 1.0)
    sizes = (HIDDEN, HIDDEN // 4, HIDDEN // 4)
    batch = SimpleNamespace(
        bs=len(PROMPTS), max_len=max(PROMPTS), permutation=None, seg_lens=whole(*PROMPTS), seg_indptr=starts(PROMPTS),
        weight_indices=whole(2, 0, 1), lora_ranks=whole(RANK, RANK, RANK // 2), scalings=torch.ones(3, device=DEVICE) / 2,
    )  # fmt: skip
    inner = sgemm_lora_a_fwd(values(rows, HIDDEN), values(3, 3 * RANK, HIDDEN, scale=0.05), batch, 3)
    y = qkv_lora_b_fwd(
        inner, values(3, sum(sizes), RANK), batch, starts(sizes), max(sizes), values(rows, sum(sizes)).clone(), len(sizes)
    )
    return out, extended, y


PARTS: dict[str, Callable[[], Any]] = {"attention": attention, "decode": decode, "lora": lora, "sglang": sglang}

if __name__ == "__main__":
    run(PARTS[sys.argv[1]])
