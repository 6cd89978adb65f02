"""Multiply by weights of four bits, for inference, from a float layer, packed weights, or a GPTQ or AWQ checkpoint.

The kernels run on a GPU and in Triton's interpreter. On any other device the weights are dequantized and torch multiplies.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from kerneltune.kernel_lib.functions import custom_op
from kerneltune.kernel_lib.tl_lib import INTERPRETED
from kerneltune.ops.int4_gemm import (
    Codes,
    Fp8Tokens,
    Fp8Weight,
    Int4Weight,
    dequantise,
    fastest_gemm,
    int4_fp8_gemm,
    int4_gemm,
    pack,
    packing,
    quantise,
    to_fp8,
)

_FP8_COPY = ("fp8_weight", "fp8_scale", "fp8_x_scale")
"""Buffers of a layer that hold an `Fp8Weight`."""


class Int4Linear(nn.Module):
    """Compute y = x · wᵀ + bias, w = (q - z) s with codes q of four bits. No tensor is a parameter, so there is no gradient.

    A new layer holds zeros. `from_linear` and `from_codes` make a layer with weights. `load_state_dict` fills a layer, and
    refuses tensors of other types, scales and biases that are not finite, and zero points other than 0 to 16.

    Args:
        in_features, out_features: K and M; K a multiple of the group and of 32, M even.
        group: consecutive inputs that share a scale: 32, 64, 128 or all of them.
        zeros: zero points instead of 8.
        bias: whether there is a bias.
        dtype: type of inputs, outputs, scales and bias: float16 or bfloat16.
        ordered: whether inputs are put into the order of a checkpoint with act-order before the product.
        activations: `fp8` casts inputs to e4m3 where the cached times of `fastest_gemm` say that it is faster, on GPUs since
            Hopper. None never casts.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None
    order: Tensor | None
    fp8_weight: Tensor | None
    fp8_scale: Tensor | None
    fp8_x_scale: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: int = 128,
        zeros: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float16,
        activations: Literal["fp8"] | None = None,
        ordered: bool = False,
    ) -> None:
        super().__init__()
        packing.check_sizes(out_features, in_features, group)
        if dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"Int4Linear takes float16 or bfloat16, got {dtype=}")
        if activations not in ("fp8", None):
            raise ValueError(f"activations must be 'fp8' or None, got {activations!r}")
        self.activations = activations
        self.in_features, self.out_features, self.group = in_features, out_features, group
        shape = packing.scale_shape(out_features, in_features, group)
        blocks = packing.block_shape(out_features, in_features)
        self.register_buffer("packed", torch.zeros(blocks, dtype=torch.int32, device=device))
        self.register_buffer("scales", torch.zeros(shape, dtype=dtype, device=device))
        self.register_buffer("zeros", torch.zeros(shape, dtype=dtype, device=device) if zeros else None)
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype, device=device) if bias else None)
        self.register_buffer("order", torch.arange(in_features, device=device) if ordered else None)
        for name in _FP8_COPY:
            self.register_buffer(name, None, persistent=False)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, group: int = 128, zeros: bool = False, activations: Literal["fp8"] | None = None
    ) -> "Int4Linear":
        """Make a layer with the nearest codes to a float16 or bfloat16 layer's weights, and its bias."""
        return cls.from_codes(quantise(linear.weight.detach(), group, zeros), linear.bias, activations=activations)

    @classmethod
    def from_codes(
        cls,
        codes: Codes,
        bias: Tensor | None = None,
        *,
        activations: Literal["fp8"] | None = None,
        order: Tensor | None = None,
    ) -> "Int4Linear":
        """Make a layer with these codes, scales and zero points, as `from_gptq` and `from_awq` give them.

        Zero points that are all 8, as symmetric checkpoints store them, are left out: the weights are the same, the kernel
        is faster.

        Args:
            bias: (M,) values on the codes' device, finite in the scales' type, or None.
            activations: as in the constructor.
            order: the columns of the codes in the order of their groups, from `group_order`; None for consecutive groups.
        """
        if order is not None:
            if wrong := _broken_order(order, codes.codes.shape[1], codes.codes.device):
                raise ValueError(wrong)
            codes = codes._replace(codes=codes.codes[:, order])
        weight = pack(*codes)
        if codes.zeros is not None and bool((codes.zeros == packing.MIDDLE).all()):
            weight = weight._replace(zeros=None)
        if bias is not None:
            packing.check_tensors(bias=bias)
            if bias.shape != (weight.rows,) or bias.device != codes.codes.device:
                where = f"({weight.rows},) on {codes.codes.device}"
                raise ValueError(f"bias must be {where}, got {tuple(bias.shape)} on {bias.device}")
            bias = bias.detach().to(weight.scales.dtype, copy=True)
            if not bool(bias.isfinite().all()):
                raise ValueError(f"bias must be finite in {bias.dtype}, got {int((~bias.isfinite()).sum())} that are not")
        layer = cls(
            weight.depth, weight.rows, group=weight.group, zeros=weight.zeros is not None, bias=bias is not None,
            device=weight.packed.device, dtype=weight.scales.dtype, activations=activations, ordered=order is not None,
        )  # fmt: skip
        layer.packed, layer.scales, layer.zeros = weight.packed, weight.scales, weight.zeros
        layer.order, layer.bias = order, bias
        return layer

    @property
    def weight(self) -> Int4Weight:
        """Return the weight as `int4_gemm` reads it."""
        return Int4Weight(self.packed, self.scales, self.zeros, self.out_features, self.in_features, self.group)

    def keep_fp8_weight(self, x_scale: float | Tensor | None = None) -> None:
        """Keep the weights in e4m3 too, a byte each, for inputs of many tokens under `activations="fp8"`.

        Call it again after the weights have changed; `load_state_dict` drops the copy. The copy moves with the layer to a
        device and to shared memory. It keeps its types and values when `half` or `to` cast the layer.

        Args:
            x_scale: the largest magnitude of inputs, over 448, if it is known in advance, as the `input_scale` of a checkpoint.
                Larger inputs then count as that magnitude wherever torch multiplies the copy. None casts each token with a
                scale of its own, which takes longer.

        Raises:
            ValueError: another `activations`; sizes that are no multiples of 16; an x_scale that is no normal fp32 above 0.
        """
        if self.activations != "fp8":
            raise ValueError(f"a layer keeps its weights in fp8 under activations='fp8', got activations={self.activations!r}")
        copy = to_fp8(dequantise(self.weight, self.scales.dtype), x_scale)
        self.fp8_weight, self.fp8_scale, self.fp8_x_scale = copy

    def forward(self, x: Tensor | Fp8Tokens) -> Tensor:
        """Multiply x (…, in_features), or tokens that are cast already, to (…, out_features)."""
        if isinstance(x, Fp8Tokens):
            return self._of_cast(x)
        if x.shape[-1:] != (self.in_features,) or x.dtype != self.scales.dtype or x.device != self.scales.device:
            raise ValueError(
                f"Int4Linear takes (…, {self.in_features}) {self.scales.dtype} on {self.scales.device}, "
                f"got {tuple(x.shape)} {x.dtype} on {x.device}"
            )
        rows = x.reshape(-1, self.in_features)
        rows = rows.contiguous() if self.order is None else rows.index_select(1, self.order)
        y: Tensor = int4_linear(
            rows, self.packed, self.scales, self.zeros, self.bias, self.out_features, self.group, self.activations == "fp8",
            self.fp8_weight, self.fp8_scale, self.fp8_x_scale,
        )  # fmt: skip
        return y.view(*x.shape[:-1], self.out_features)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply `fn` to every buffer, and to the fp8 copy as bytes, so that casts of floating-point tensors leave the copy."""
        copy = [getattr(self, name) for name in _FP8_COPY]

        def keep_type(t: Tensor) -> Tensor:
            return fn(t.view(torch.uint8)).view(t.dtype) if any(t is kept for kept in copy) else fn(t)

        super()._apply(keep_type, recurse)  # type: ignore[no-untyped-call]
        return self

    def _of_cast(self, x: Fp8Tokens) -> Tensor:
        """Multiply tokens (N, in_features) that `norm_tokens` or `cast_tokens` made."""
        if self.activations != "fp8" or self.order is not None:
            got = f"activations={self.activations!r}, ordered={self.order is not None}"
            raise ValueError(f"Fp8Tokens need a layer with activations='fp8' and ordered=False, got {got}")
        if (x.depth, x.dtype) != (self.in_features, self.scales.dtype):
            raise ValueError(f"Int4Linear takes (N, {self.in_features}) {self.scales.dtype}, got (N, {x.depth}) {x.dtype}")
        y: Tensor = int4_fp8_linear(
            x.q,
            x.scale,
            x.sums,
            self.packed,
            self.scales,
            self.zeros,
            self.bias,
            self.out_features,
            self.in_features,
            self.group,
        )
        return y

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Load nothing of a state that torch would convert to the layer's types, or whose values no weights have."""
        found = [e for name, t in self.named_buffers() if (e := _broken(name, state_dict.get(prefix + name), t.dtype))]
        args[-1].extend(f"{prefix}{error}" for error in found)  # the list of error messages
        self.fp8_weight = self.fp8_scale = self.fp8_x_scale = None
        if not found:
            super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Return the text that `print(module)` shows."""
        zeros, bias = self.zeros is not None, self.bias is not None
        cast = f", activations={self.activations}" if self.activations else ""
        return f"{self.in_features}, {self.out_features}, group={self.group}, zeros={zeros}, bias={bias}{cast}"


def _broken(name: str, loaded: Any, dtype: torch.dtype) -> str | None:
    """Return why a tensor cannot be loaded; None if the tensor can be loaded, or if torch itself gives the reason."""
    if not isinstance(loaded, Tensor):
        return None
    if loaded.dtype != dtype:
        return f"{name} must be {dtype}, got {loaded.dtype}"
    if name == "packed" or loaded.is_meta:
        return None
    if name == "order":
        return _broken_order(loaded, len(loaded), loaded.device)
    wrong = int((~loaded.isfinite()).sum())
    if wrong:
        return f"{name} must be finite, got {wrong} that are not"
    if name == "zeros":
        wrongs = loaded[(loaded < 0) | (loaded > packing.MOST_ZERO) | (loaded != loaded.round())]
        return f"zeros must be integers 0 … {packing.MOST_ZERO}, got {float(wrongs[0])}" if len(wrongs) else None
    return None


def _broken_order(order: Tensor, depth: int, where: torch.device) -> str | None:
    """Return why a tensor is no order of so many columns; None if it is."""
    packing.check_tensors(order=order)
    if order.shape != (depth,) or order.dtype != torch.int64 or order.device != where:
        return f"order must be ({depth},) torch.int64 on {where}, got {tuple(order.shape)} {order.dtype} on {order.device}"
    is_permutation = torch.equal(order.sort().values, torch.arange(depth, device=where))
    return None if is_permutation else f"order must have each of 0 … {depth - 1} once"


@custom_op("kerneltune::int4_linear")
def int4_linear(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, rows: int, group: int,
    cast: bool = False, fp8_weight: Tensor | None = None, fp8_scale: Tensor | None = None, fp8_x_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Multiply x (N, K) and a packed weight of so many rows and its group to y (N, rows) of x's type, contiguous.

    cast: x may be cast to e4m3. fp8_weight, fp8_scale, fp8_x_scale: the weight as `to_fp8` gives it, or None.
    """
    weight = Int4Weight(packed, scales, zeros, rows, x.shape[1], group)
    if (x.is_cuda or INTERPRETED) and cast:
        copy = None if fp8_weight is None or fp8_scale is None else Fp8Weight(fp8_weight, fp8_scale, fp8_x_scale)
        return fastest_gemm(x, weight, bias, copy)
    if x.is_cuda or INTERPRETED:
        return int4_gemm(x, weight, bias)
    return nn.functional.linear(x, dequantise(weight, x.dtype), bias)


@int4_linear.register_fake
def _(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, rows: int, *_others: Any) -> Tensor:
    return x.new_empty((x.shape[0], rows))


@custom_op("kerneltune::int4_fp8_linear")
def int4_fp8_linear(
    q: Tensor, scale: Tensor, sums: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None,
    rows: int, depth: int, group: int,
) -> Tensor:  # fmt: skip
    """Multiply the q, scale and sums of `Fp8Tokens` and a packed weight (rows, depth) to y (N, rows) of the scales' type."""
    tokens, weight = Fp8Tokens(q, scale, sums, depth, scales.dtype), Int4Weight(packed, scales, zeros, rows, depth, group)
    return int4_fp8_gemm(tokens, weight, bias)


@int4_fp8_linear.register_fake
def _(
    q: Tensor, _s: Tensor, _sums: Tensor, _packed: Tensor, scales: Tensor, _z: Any, _b: Any, rows: int, *_others: Any
) -> Tensor:
    return scales.new_empty((q.shape[0], rows))
