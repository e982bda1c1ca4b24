"""Small models, each with one structure. All take float64 values of any batch and length."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, SIZE = 10, 5, 4  # of the stream of values, number of heads, of each head
INNER = HEADS * SIZE


def heads(x: Tensor, count: int = HEADS) -> Tensor:
    """[batch, seq, heads * size] -> [batch, heads, seq, size]."""
    return x.view(x.shape[0], x.shape[1], count, -1).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """The inverse of `heads`."""
    return x.transpose(1, 2).flatten(2)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """Attention written out: two products and a softmax."""
    return torch.softmax(q @ k.transpose(-2, -1) / SIZE**0.5 + bias, -1) @ v


class Mlp(nn.Module):
    def __init__(self, inner: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class GatedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8, bias=False)
        self.down = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class FusedGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 16), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class TwoReaders(nn.Module):
    """A column output is read three times, element by element."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(F.gelu(h) * h + torch.tanh(h))


class TwoRows(nn.Module):
    """One column output, two row-parallel products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.a, self.b = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.up(x))
        return self.a(h), self.b(h)


class BlockQkv(nn.Module):
    """Query, key and value one after the other in a fused weight (GPT-2's layout)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(part) for part in self.qkv(x).split(INNER, -1))
        return self.out(joined(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class InterleavedQkv(nn.Module):
    """Query, key and value of each head together in a fused weight (GPT-NeoX's layout)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = heads(self.qkv(x)).chunk(3, -1)
        return self.out(joined(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class IndexedQkv(nn.Module):
    """The same layout, taken apart by indexing a dim of three."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.qkv(x).view(x.shape[0], x.shape[1], HEADS, 3, SIZE)
        q, k, v = (fused[..., i, :].transpose(1, 2) for i in range(3))
        return self.out(joined(F.scaled_dot_product_attention(q, k, v)))


class Attention(nn.Module):
    """Query, key and value apart; subclasses change what happens between the products."""

    def __init__(self, key_heads: int = HEADS) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, key_heads * SIZE) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        return self.out(joined(self.mix(q, k, v)))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class EagerAttention(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.full((q.shape[2], q.shape[2]), -1e9, dtype=q.dtype, device=q.device)
        return attend(q, k, v, torch.triu(mask, diagonal=1))


class NormedAttention(Attention):
    """Query and key of each head are normalized; the scale is shared by all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(SIZE), nn.LayerNorm(SIZE)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(self.q_norm(q), self.k_norm(k), v)


class SlopedAttention(Attention):
    """A constant of each head, made by counting (ALiBi)."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[2], device=q.device)
        slopes = 0.5 ** torch.arange(1, HEADS + 1, device=q.device, dtype=q.dtype)
        distance = -(places[:, None] - places[None, :]).abs()
        return attend(q, k, v, slopes[:, None, None] * distance)


class JoinedSlopes(Attention):
    """The same, joined of two series (ALiBi for a number of heads that is no power of two)."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[2], device=q.device)
        base = torch.tensor(0.5, dtype=q.dtype, device=q.device)
        one = torch.pow(base, torch.arange(1, 5, device=q.device))
        other = torch.pow(base, torch.arange(1, 2 * (HEADS - 4), 2, device=q.device))
        slopes = torch.cat([one, other])
        return attend(q, k, v, slopes[:, None, None] * (places[:, None] - places).abs())


class WideNormBetween(nn.Module):
    """Two large products that no pair splits."""

    def __init__(self, inner: int = 60) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, inner), nn.LayerNorm(inner)
        self.down = nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)))


class BufferedSlopes(Attention):
    """A constant of each head, held in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", 0.5 ** torch.arange(1, HEADS + 1), persistent=False)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[2], device=q.device)
        return attend(q, k, v, self.slopes[:, None, None] * (places[:, None] - places).abs())


class RelativeBias(Attention):
    """A table [buckets, heads] of values to add to the scores (T5)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, HEADS)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[2], device=q.device)
        buckets = (places[:, None] - places[None, :]).abs().clamp(max=5)
        return attend(q, k, v, self.table(buckets).permute(2, 0, 1)[None])


class SharedBias(Attention):
    """One bias for the scores of all heads: a parameter that enters sharded computation whole."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[2], device=q.device)
        return attend(q, k, v, self.scale * (places[:, None] - places[None, :]).abs())


class Grouped(Attention):
    """Three key heads serve six query heads; `how` says in which words."""

    def __init__(self, how: str) -> None:
        super().__init__(key_heads=3)
        self.q, self.out, self.how = nn.Linear(WIDTH, 6 * SIZE), nn.Linear(6 * SIZE, WIDTH), how

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = heads(self.q(x), 6), heads(self.k(x), 3), heads(self.v(x), 3)
        if self.how == "enable_gqa":
            return self.out(joined(F.scaled_dot_product_attention(q, k, v, enable_gqa=True)))
        return self.out(joined(F.scaled_dot_product_attention(q, self.many(k), self.many(v))))

    def many(self, x: Tensor) -> Tensor:
        if self.how == "repeat_interleave":
            return x.repeat_interleave(2, dim=1)
        b, h, s, d = x.shape
        return x[:, :, None].expand(b, h, 2, s, d).reshape(b, 2 * h, s, d)


class LowRank(nn.Module):
    """LoRA on a column layer and on a row layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.up_a, self.up_b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.down_a, self.down_b = nn.Linear(8, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x) + self.up_b(self.up_a(x)))
        return self.down(h) + self.down_b(self.down_a(h))


class PlainList(nn.Module):
    """The same modules, called through a plain Python list."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Residual(Mlp()), Residual(Mlp(7))
        self.both = [self.one, self.two]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.both:
            x = block(x)
        return x


class SharedBlock(nn.Module):
    """One module, called by two layers (ALBERT)."""

    def __init__(self) -> None:
        super().__init__()
        block = Mlp()
        self.layers = nn.ModuleList([Residual(block), Residual(block)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Residual(nn.Module):
    def __init__(self, block: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.block = nn.LayerNorm(width), block

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(self.norm(x))


class Transformer(nn.Module):
    """Two blocks of attention and MLP with a tied embedding and head; takes tokens."""

    def __init__(self, layers: int = 2, vocabulary: int = 11) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for _ in range(layers):
            blocks += [Residual(BlockQkv()), Residual(Mlp())]
        self.embed, self.blocks = nn.Embedding(vocabulary, WIDTH), nn.Sequential(*blocks)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        logits = self.head(self.norm(self.blocks(self.embed(tokens))))
        if targets is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten()), "logits": logits}


# ---- what must not be paired


class NormBetween(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)))


class SoftmaxBetween(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.softmax(self.up(x), -1))


class ReadElsewhere(NormBetween):
    """The column output is read by a product, and elsewhere by a norm that needs it whole."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.up(x)
        return self.down(F.gelu(h)), self.norm(h)


class MixedByView(Mlp):
    """A view that lays features over positions."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h.view(h.shape[0], h.shape[2], h.shape[1]).transpose(1, 2))


class UnlikeViews(nn.Module):
    """Twelve features, once read as 3 x 4 and once as 4 x 3."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        three = F.normalize(h.unflatten(-1, (3, 4)), dim=-1).flatten(-2)
        four = F.normalize(h.unflatten(-1, (4, 3)), dim=-1).flatten(-2)
        return self.down(three + four)


@torch.library.custom_op("autotp_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """An operator that nobody wrote a rule for."""
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


twice.register_autograd(lambda ctx, grad: grad * 2)


class UnknownBetween(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(twice(self.up(x)))
