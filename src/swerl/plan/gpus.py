"""What one GPU has: memory, arithmetic and bandwidth, by the name that the price book uses too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU."""

    memory_gib: float
    """What CUDA reports."""
    bf16_flops: float
    """Dense bf16 matrix operations a second, by the data sheet."""
    bytes_per_s: float
    """Of its memory, by the data sheet."""


GPUS = {
    "a100": Gpu(79.2, 312e12, 2.04e12),
    "h100": Gpu(79.1, 989e12, 3.35e12),
    "h200": Gpu(139.8, 989e12, 4.8e12),
    "b200": Gpu(178.4, 2250e12, 8.0e12),
}
"""SXM versions. Peaks are those of NVIDIA's data sheets without sparsity; a real matrix product
reaches some 70 % of them, so that a share of the peak understates how busy a GPU is."""
