"""A byte-level transformer whose feed-forward layers are mixtures of experts, two to a token."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerneltune.nn import GroupedLinear, Recipe, permute_tokens, sort_tokens, unpermute_tokens

BYTES = 256


@dataclass(frozen=True)
class Sizes:
    """width: of a token; hidden: of an expert; length: bytes of a sequence."""

    width: int = 256
    hidden: int = 512
    experts: int = 8
    layers: int = 4
    heads: int = 4
    length: int = 256


class Experts(nn.Module):
    """Run two of the experts for every token, weighted by their router."""

    def __init__(self, sizes: Sizes, recipe: str | Recipe | None) -> None:
        super().__init__()
        self.router = nn.Linear(sizes.width, sizes.experts, bias=False)
        self.up = GroupedLinear(sizes.experts, sizes.width, 2 * sizes.hidden, recipe=recipe)
        self.down = GroupedLinear(sizes.experts, sizes.hidden, sizes.width, recipe=recipe)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Send x (tokens, width) to the chosen experts, in groups as the router makes them.

        Returns:
            (tokens, width), and how uneven the router is: 1 where it is not.
        """
        shares = self.router(x).float().softmax(-1)
        weights, chosen = shares.topk(2, sorted=False)
        routing = sort_tokens(chosen, shares.shape[1])
        gate, up = self.up(permute_tokens(x, routing), routing.offs).chunk(2, -1)
        results = self.down(F.silu(gate) * up, routing.offs)
        counts = routing.offs.diff(prepend=routing.offs.new_zeros(1))
        unevenness = shares.shape[1] * (shares.mean(0) * (counts / chosen.numel()).detach()).sum()
        return unpermute_tokens(results, routing, weights), unevenness


class Block(nn.Module):
    """Apply attention, then experts."""

    def __init__(self, sizes: Sizes, recipe: str | Recipe | None) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.before_attention, self.before_experts = nn.RMSNorm(sizes.width), nn.RMSNorm(sizes.width)
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)
        self.experts = Experts(sizes, recipe)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (batch, length, width) for x of that shape, and the router's unevenness."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.before_attention(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y, unevenness = self.experts(self.before_experts(x).flatten(0, 1).to(torch.bfloat16))
        return x + y.view_as(x), unevenness


class Model(nn.Module):
    """Predict the next byte from bytes."""

    def __init__(self, sizes: Sizes, recipe: str | Recipe | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, sizes.width)
        self.places = nn.Embedding(sizes.length, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes, recipe) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, BYTES, bias=False)

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (batch, length, 256) for text (batch, length), and the mean unevenness of the routers."""
        x = self.embedding(text) + self.places.weight[: text.shape[1]]
        uneven = []
        for block in self.blocks:
            x, unevenness = block(x)
            uneven.append(unevenness)
        return self.head(self.norm(x)).float(), torch.stack(uneven).mean()
