"""Compare two tensors, and report the places of disagreement in a line, for the `compare` functions of operators."""

import torch

from kerneltune.spec import Case, Inputs, Outputs

_SHARE = 0.1
"""Share of elements that may be a step off: results rounded to bf16 before the cast to fp8 leave a sixteenth a step off."""
_BIASED_SHARE = 0.01
"""From this share of elements a step off, the check compares the counts above and below the expected values."""
_FEW, _SIGMAS = 2, 4.0
_LEANING_SHARE, _LEANING = 0.1, 0.1
"""From this share of elements off, results in 16 bits lean if the counts above and below differ by this share of these elements.
Sums in another order leave 0.14 % off, partial sums in 16 bits up to 99 % with a difference below 4 %; truncation leaves 50 % off
with a difference of 36 to 100 % (docs/notes/checks.md)."""
_LEANING_ROWS, _ROWS_SHARE = 16, 0.9
"""Against a reference, the elements of a row may lean as a rounded factor of the row does: most rows must lean."""
_ROUNDED = (torch.bfloat16, torch.float16)
_SAMPLE, _FEWEST_TRUNCATED, _TRUNCATED, _SMALL_MANTISSA = 1 << 16, 16, 0.9, 0.625
"""First elements that are looked at for truncation; fewest elements just below a value of 16 bits, with a mantissa from 0.5 to
the limit; the share of these elements that is truncated. Sums in another order leave 0.14 % off, partial sums in bf16 40 %."""
_SIDED_SHARE, _SIDED_ELEMENTS, _SIDED_ROWS = 0.003, 4, 6
"""Limits of a verdict on the sides of rows: least share of elements that are a step off, least number of these elements in a
row, and least number of rows with so many. Four independent errors lie on a single side in an eighth of rows
(docs/notes/checks.md)."""
_SCALE_ROUNDING = 1e-5
_POISON = (0x7FC00000, 0x7FF00000, 0x7FE00000)
"""Bits of poisoned memory after a cast to fp32: from 16 bits or more, from e4m3, from e5m2. Processors compute NaN with other
bits, except a GPU in e4m3."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def close(name: str, got: torch.Tensor, want: torch.Tensor, rtol: float, atol: float | torch.Tensor) -> list[str]:
    """Require equality within atol + rtol |want|; NaN agrees with NaN, infinity with itself.

    Integers must be equal within atol. Values in float64 are compared in float64, all other values in float32. Results in
    16 bits that are truncated where the cast of the expected values rounds them up fail, whatever the tolerance.

    Raises:
        ValueError: a tolerance is negative or NaN.
    """
    for limit, value in (("rtol", rtol), ("atol", atol)):
        if not isinstance(value, torch.Tensor) and not value >= 0:
            raise ValueError(f"close: {limit} of {name}: {value!r}: expected 0 or more")
    for value in (got, want):
        if not isinstance(value, torch.Tensor):
            return [f"{name}: {type(value).__name__}: expected a tensor"]
    if got.shape != want.shape:
        return [f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"]
    if got.is_complex() or want.is_complex():
        if got.is_complex() != want.is_complex():
            return [f"{name}: {got.dtype}, expected {want.dtype}"]
        got, want = torch.view_as_real(got), torch.view_as_real(want)
    if not got.is_floating_point() and not want.is_floating_point():
        got, want = got.long(), want.long()
        return _report(name, (got - want).abs() > atol, got, want)
    truncated = _truncated(name, got, want)
    wide = torch.float64 if got.dtype == torch.float64 else torch.float32
    got, want = got.to(wide), want.to(wide)
    same = (got == want) | (got.isnan() & want.isnan())
    near = want.isfinite() & ((got - want).abs() <= atol + rtol * want.abs())
    return _report(name, ~(same | near), got, want) or truncated


def _truncated(name: str, got: torch.Tensor, want: torch.Tensor) -> list[str]:
    """Return a line if results in 16 bits are the expected values in 32 bits without their last bits, and not rounded.

    A factor that was rounded to bf16 moves a value by a third of a step at most, if its mantissa is small, so that values just
    below a step are still rounded up.
    """
    if got.dtype not in _ROUNDED or want.dtype not in (torch.float32, torch.float64):
        return []
    got, want = got.flatten()[:_SAMPLE], want.flatten()[:_SAMPLE]
    rounded = want.to(got.dtype)
    is_up = (rounded.to(want.dtype).abs() > want.abs()).to(torch.int16)
    below, above = ((rounded.view(torch.int16) + step).view(got.dtype) for step in (-is_up, 1 - is_up))
    place = (want - below.to(want.dtype)) / (above.to(want.dtype) - below.to(want.dtype))
    for side in ((place > 0.9) & (want.frexp().mantissa.abs() < _SMALL_MANTISSA), (place > 0) & (place < 0.25)):
        count = int((side & want.isfinite()).sum())
        if count < _FEWEST_TRUNCATED or int((side & (got == below)).sum()) < _TRUNCATED * count:
            return []
    return [f"{name}: {int(((got == below) & (is_up > 0)).sum())} of {int(is_up.sum())} elements that round up are truncated"]


def check_tolerance(rtol: object, atol: object, place: str = "") -> None:
    """Raise ValueError, with the place first, for a tolerance that is no number, or that accepts any values."""
    for name, value, most in (("rtol", rtol, 1.0), ("atol", atol, float("inf"))):
        if not isinstance(value, float | int) or not 0 <= value < most:
            raise ValueError(f"{place}{name}: {value!r}: expected a number from 0 to below {most:g}")


def same_bits(name: str, got: torch.Tensor, want: torch.Tensor) -> list[str]:
    """Require equal shape, dtype and bits; any NaN agrees with any NaN."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return [f"{name}: {tuple(got.shape)} {got.dtype}, expected {tuple(want.shape)} {want.dtype}"]
    bits = _BITS[got.dtype.itemsize]
    wrong = got.view(bits) != want.view(bits)
    if not bool(wrong.any()):
        return []  # without the memory of fp32 copies
    if not got.is_floating_point():
        return _report(name, wrong, got, want)
    got32, want32 = got.float(), want.float()
    return _report(name, wrong & ~(got32.isnan() & want32.isnan()), got32, want32)


def all_same_bits(_case: Case, _inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Require `same_bits` of every output, as the `compare` of an operator; return a line per wrong output."""
    return [line for name, want in expected.items() for line in same_bits(name, outputs[name], want)]


def within_a_step(name: str, got: torch.Tensor, want: torch.Tensor, share: float = _SHARE) -> list[str]:
    """Compare values in 8 or 16 bits that may differ by a step, for results that differ in their last place before the cast.

    Integers are values as well. At most `share` of the elements may be off. As many of them must be off towards zero as away
    from zero, so that a cast by truncation fails. Each row must have both, so that a rounded factor of a row fails. NaN agrees
    with NaN alone.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        return [f"{name}: {tuple(got.shape)} {got.dtype}, expected {tuple(want.shape)} {want.dtype}"]
    got32, want32 = got.float(), want.float()
    distance = _ordered(got) - _ordered(want)
    either_nan = got32.isnan() | want32.isnan()
    near = (distance.abs() <= 1) & ~either_nan
    if wrong := _report(name, ~(near | (got32.isnan() & want32.isnan())), got32, want32):
        return wrong
    off = near & (distance != 0)
    count, total = int(off.sum()), off.numel()
    leans, side = _leaning(got32, want32, off)
    is_leaning = count > _BIASED_SHARE * total and abs(leans) > _SIGMAS * count**0.5
    if count > max(_FEW, share * total + _SIGMAS * (share * total) ** 0.5):
        rounded = f": {side}" if is_leaning else ""
        return [f"{name}: {count} of {total} are a step off, at most {share:.0%} may be{rounded}"]
    return [f"{name}: {side}"] if is_leaning else _sided(name, got32, want32, off)


def _sided(name: str, got: torch.Tensor, want: torch.Tensor, off: torch.Tensor) -> list[str]:
    """Return a line if in most rows the elements that are a step off are all too small, or all too large.

    A factor of the row that was rounded has this effect.
    """
    rows = off.reshape(-1, off.shape[-1] if off.ndim else 1)
    lower, count = ((rows & side.reshape(rows.shape)).sum(1) for side in (got.abs() < want.abs(), off))
    is_sided = ((lower == 0) | (lower == count))[count >= _SIDED_ELEMENTS]
    num_sided, num_rows = int(is_sided.sum()), is_sided.numel()
    if int(count.sum()) <= _SIDED_SHARE * off.numel() or num_sided < max(_SIDED_ROWS, _ROWS_SHARE * num_rows):
        return []
    return [f"{name}: all elements that are a step off are to one side in {num_sided} of {num_rows} rows: is a factor rounded?"]


def leaning(got: torch.Tensor, want: torch.Tensor, *, by_rows: bool) -> str:
    """Return how results in 16 bits lean to a side of the expected results, as a cast by truncation leans; empty if they do not.

    Args:
        by_rows: most rows must lean; for expected results of another program, whose factor of a row may be rounded otherwise.
    """
    got32, want32 = (
        got.float().reshape(-1, got.shape[-1] if got.ndim else 1),
        want.float().reshape(-1, got.shape[-1] if got.ndim else 1),
    )
    off = (got32 != want32) & got32.isfinite() & want32.isfinite()
    count = int(off.sum())
    if count <= max(_FEW, _LEANING_SHARE * off.numel()):
        return ""
    leans, side = _leaning(got32, want32, off)
    if abs(leans) <= max(_SIGMAS * count**0.5, _LEANING * count):
        return ""
    if by_rows:
        sides = ((off & (got32.abs() < want32.abs())).sum(1) * 2 - off.sum(1)).sign()
        sides = sides[sides != 0]
        if sides.numel() < _LEANING_ROWS or abs(int(sides.sum())) < (2 * _ROWS_SHARE - 1) * sides.numel():
            return ""
    return side


def _leaning(got: torch.Tensor, want: torch.Tensor, off: torch.Tensor) -> tuple[int, str]:
    """Return how many more of the elements that are off lie towards zero than away from zero, and a text for the larger part."""
    count, lower = int(off.sum()), int((off & (got.abs() < want.abs())).sum())
    side, larger = ("towards zero", lower) if 2 * lower > count else ("away from zero", count - lower)
    return 2 * lower - count, f"{larger} of the {count} elements that are off are rounded {side}"


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """Return integers in the order of the values, in 8 or 16 bits; neighbours differ by 1."""
    if not values.is_floating_point():
        return values.to(torch.int32)
    half = 1 << (8 * values.element_size() - 1)
    bits = values.view(_BITS[values.element_size()]).to(torch.int32) & (2 * half - 1)
    return torch.where(bits >= half, half - bits, bits)


def rowwise(name: str, q: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, pow2: bool = False) -> list[str]:
    """Compare rows in fp8 or int8 and their scales, x ≈ q * scale, with x before the cast (rows, columns): a scale for each row.

    Args:
        pow2: scales, which are factors, are rounded up to powers of two, as multipliers 1 / scale are rounded down.
    """
    if scale.numel() != q.shape[0]:
        return [f"{name} scale: {scale.numel()} elements, expected one for each of {q.shape[0]} rows"]
    return _scaled(name, q, scale.reshape(-1, 1), x, x.float().abs().amax(1, keepdim=True), pow2)


def tensorwise(name: str, q: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, pow2: bool = False) -> list[str]:
    """Compare values in fp8 or int8 and their scale as `rowwise` does: one scale for all elements."""
    if scale.numel() != 1:
        return [f"{name} scale: {scale.numel()} elements, expected 1"]
    return _scaled(name, q, scale.reshape(1, 1), x, x.float().abs().amax().reshape(1, 1), pow2)


def _scaled(name: str, q: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, amax: torch.Tensor, pow2: bool) -> list[str]:
    largest = torch.finfo(q.dtype).max if q.is_floating_point() else torch.iinfo(q.dtype).max
    wanted = amax / largest
    if pow2:
        wanted = torch.exp2(torch.ceil(torch.log2(wanted)))
    wanted = torch.where(amax > 0, wanted, scale)  # any scale of zeros may give zeros
    if wrong := close(f"{name} scale", scale, wanted, rtol=_SCALE_ROUNDING, atol=0.0):
        return wrong
    quotient = torch.where(amax == 0, 0.0, x.float() / scale)
    quotient = quotient.clamp(-largest, largest)
    return within_a_step(name, q, (quotient if q.is_floating_point() else quotient.round()).to(q.dtype))


def _nan_hint(values: torch.Tensor) -> str:
    """Return how many wrong results are NaN, and whether they have the bits of poisoned memory; empty for no NaN."""
    poisoned = sum(int((values.float().view(torch.int32) == bits).sum()) for bits in _POISON)
    hint = f"; {poisoned} are NaN, as elements that are never written, or loaded under a mask without `other`" if poisoned else ""
    computed = values.numel() - poisoned
    return f"{hint}; {computed} are NaN that the kernel computes, such as 0 / 0 or inf - inf" if computed else hint


def _report(name: str, wrong: torch.Tensor, got: torch.Tensor, want: torch.Tensor) -> list[str]:
    count = int(wrong.sum())
    if not count:
        return []
    first = tuple(int(i) for i in wrong.nonzero()[0])
    hint = _nan_hint(got[wrong & got.isnan() & ~want.isnan()])
    digits = ".12g" if got.dtype == torch.float64 else ".6g" if got.is_floating_point() else "d"
    if f"{got[first].item():{digits}}" == f"{want[first].item():{digits}}":
        digits = ".17g" if got.dtype == torch.float64 else ".9g"  # they differ in the last place
    values = ", expected ".join(f"{tensor[first].item():{digits}}" for tensor in (got, want))
    return [f"{name}: {count} of {wrong.numel()} wrong, first at {first}: {values}{hint}"]
