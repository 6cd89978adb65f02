"""Run what the page about int4 shows: make a layer of a checkpoint's tensors; name the product that runs."""

import json
import re
from collections import Counter
from typing import Any

import pytest
import torch
from doc_blocks import ROOT, blocks
from int4_codes import DEVICE, exact, some_codes, whole_numbers

from kerneltune.ops.int4_gemm import group_order, to_awq, to_gptq

PAGE = ROOT / "docs" / "int4.md"
CODES, BIAS = some_codes(64, 256, 64), whole_numbers(1, 64, torch.float16)[0]
NAMES = ("qweight", "qzeros", "scales")


def layer_of(*arguments: object, **options: bool) -> Any:
    """Call the function of the page."""
    (block,) = (block for block in blocks(PAGE) if "def layer_of" in block.text)
    names: dict[str, Any] = {}
    exec("from kerneltune.nn import Int4Linear\n" + block.text, names)
    return names["layer_of"](*arguments, **options)


def checkpoint(g_idx: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
    found = {**dict(zip(NAMES, to_gptq(CODES), strict=True)), "bias": BIAS}
    return found if g_idx is None else {**found, "g_idx": g_idx}


@pytest.mark.parametrize("g_idx", [None, torch.arange(256, device=DEVICE) // 64])
def test_layer_of_a_checkpoint_gives_its_product(g_idx: torch.Tensor | None) -> None:
    x = whole_numbers(3, 256, torch.float16)
    want = exact(x, CODES, BIAS)
    assert torch.equal(layer_of(checkpoint(g_idx), "gptq")(x), want)
    assert torch.equal(layer_of({**dict(zip(NAMES, to_awq(CODES), strict=True)), "bias": BIAS}, "awq")(x), want)


def test_layer_of_a_checkpoint_with_act_order_takes_its_groups_or_raises() -> None:
    g_idx = (torch.arange(256, device=DEVICE) // 64)[torch.randperm(256, device=DEVICE)]
    with pytest.raises(ValueError, match="else take `group_order`"):
        layer_of(checkpoint(g_idx), "gptq")
    x, order = whole_numbers(3, 256, torch.float16), group_order(g_idx, 64)
    want = exact(x[:, order], CODES._replace(codes=CODES.codes[:, order]), BIAS)
    assert torch.equal(layer_of(checkpoint(g_idx), "gptq", act_order=True)(x), want)


def test_products_of_the_page_are_those_of_the_shipped_configs() -> None:
    entries = json.loads((ROOT / "configs" / "nvidia_h200" / "int4_fastest_gemm.json").read_text())["entries"]
    taken = Counter(
        (e["axes"]["N"], e["config"]["product"].partition("_scaled")[0])
        for e in entries
        if (e["options"]["group"], e["options"]["zeros"], e["options"]["fp8_copy"]) == (128, False, True)
    )
    rows = re.findall(r"^\| (\d+) \| (\d+)[^|]* \| (\d+)[^|]* \| (\d+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    told = {
        (int(row[0]), name): int(n)
        for row in rows
        for name, n in zip(("int4_gemm", "int4_fp8_gemm", "fp8"), row[1:], strict=True)
    }
    assert {key: count for key, count in told.items() if count} == taken
