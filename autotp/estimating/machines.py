"""Described machines: published figures, and the shares of them that are assumed to be achieved."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """One kind of accelerator and the links between those that share a model.

    `flops` are dense peaks by dtype per second, `memory_bandwidth` and `link_bandwidth` bytes per
    second (links: of one device, one direction), `latency` seconds of one hop. The `_share` fields
    are assumptions: what part of a peak large operations reach.
    """

    name: str
    memory: float
    flops: dict[str, float]
    memory_bandwidth: float
    link_bandwidth: float
    devices: int  # that the links join
    half: str  # the dtype of mixed precision
    source: str
    flops_share: float = 0.6
    memory_share: float = 0.8
    link_share: float = 0.8
    latency: float = 5e-6
    launch: float = 5e-6  # seconds that the shortest kernel takes
    reserve: float = 1 * GIB  # bytes of the driver, libraries and fragments

    def gemm(self, dtype: str) -> float:
        """FLOP/s achieved by matrix products; a dtype that is not listed counts as float32."""
        return self.flops.get(dtype, self.flops["float32"]) * self.flops_share

    def all_reduce(self, size: float, ranks: int) -> tuple[float, str]:
        """Seconds of an all-reduce of `size` bytes, and the faster algorithm of ring and tree."""
        if ranks == 1:
            return 0.0, "none"
        rate = self.link_bandwidth * self.link_share
        ring = 2 * (ranks - 1) * (size / ranks / rate + self.latency)
        tree = 2 * (size / rate + (ranks - 1).bit_length() * self.latency)
        return (ring, "ring") if ring <= tree else (tree, "tree")

    def half_ring(self, size: float, ranks: int) -> tuple[float, str]:
        """Seconds of an all-gather to `size` bytes on every rank, or of a reduce-scatter of
        `size` bytes, over a ring: each is half of a ring's all-reduce."""
        rate = self.link_bandwidth * self.link_share
        return (ranks - 1) * (size / ranks / rate + self.latency), "ring"


_HOPPER = {"float32": 67e12, "bfloat16": 989e12, "float16": 989e12}

MACHINES: dict[str, Machine] = {
    "v100": Machine(
        "V100 32 GB in a DGX-2 (16 over NVSwitch)",
        memory=31.7 * GIB,
        flops={"float32": 15.7e12, "float16": 125e12},
        memory_bandwidth=900e9,
        link_bandwidth=150e9,
        devices=16,
        half="float16",
        source="NVIDIA Tesla V100 datasheet (125 TFLOP/s, 900 GB/s, NVLink 300 GB/s both ways)",
    ),
    "a100": Machine(
        "A100 80 GB SXM in a DGX A100 (8 over NVSwitch)",
        memory=79.2 * GIB,
        flops={"float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12},
        memory_bandwidth=2039e9,
        link_bandwidth=300e9,
        devices=8,
        half="bfloat16",
        source="NVIDIA A100 datasheet (312 TFLOP/s, 2039 GB/s, NVLink 600 GB/s both ways)",
    ),
    "h100": Machine(
        "H100 80 GB SXM in a DGX H100 (8 over NVSwitch)",
        memory=79.2 * GIB,
        flops=_HOPPER,
        memory_bandwidth=3350e9,
        link_bandwidth=450e9,
        devices=8,
        half="bfloat16",
        source="NVIDIA H100 datasheet (989 TFLOP/s dense, 3.35 TB/s, NVLink 900 GB/s both ways)",
    ),
    "h200": Machine(
        "H200 141 GB SXM (8 over NVSwitch)",
        memory=139.8 * GIB,
        flops=_HOPPER,
        memory_bandwidth=4800e9,
        link_bandwidth=450e9,
        devices=8,
        half="bfloat16",
        source="NVIDIA H200 datasheet (989 TFLOP/s dense, 4.8 TB/s, NVLink 900 GB/s both ways)",
    ),
}
