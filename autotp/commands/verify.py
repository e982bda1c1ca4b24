"""`autotp verify`: every rank against the model, in this process."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

import torch
from torch import nn

from autotp.commands.models import dtype_of, load
from autotp.commands.output import show, working
from autotp.errors import InputError, message
from autotp.verification import Report

COPIES = 5  # of the weights: the model, its refilled copy, all shards, and two sets of gradients


def run(arguments: Namespace) -> int:
    """Print the report; 1 if something differs."""
    from autotp.api import verify

    if arguments.tp is None:
        raise InputError(
            message("--tp is needed", values="--tp not given", because="verify runs tp ranks")
        )
    dtype = _dtype(arguments.dtype)
    with working(arguments, "building on meta"):
        _must_fit(load(_without_weights(arguments)).model)
    torch.manual_seed(arguments.seed)
    with working(arguments, "building on the CPU"):
        source = load(arguments, "cpu")
    with working(arguments, f"running the model and {arguments.tp} ranks"):
        report = verify(
            source.model,
            arguments.tp,
            example_inputs=source.example_inputs,
            backward=not arguments.no_backward,
            sequence_parallel=arguments.sequence_parallel,
            dtype=dtype,
            limit=arguments.limit,
        )
    show(arguments, str(report), _data(report))
    return 0 if report.ok else 1


def _dtype(name: str | None) -> torch.dtype | None:
    dtype = None if name is None else dtype_of(name)
    if dtype is not None and not dtype.is_floating_point:
        because = "a model has gradients in floating point only"
        raise InputError(message("--dtype is not for models", values=str(dtype), because=because))
    return dtype


def _without_weights(arguments: Namespace) -> Namespace:
    return Namespace(**{**vars(arguments), "weights": False})


def _must_fit(model: nn.Module) -> None:
    needed = COPIES * sum(p.numel() * p.element_size() for p in model.parameters())
    there = _memory()
    if there is not None and needed > there:
        raise InputError(
            message(
                "the model is too large to run here",
                values=f"{needed / 2**30:.1f} GiB for {COPIES} copies of the weights, "
                f"{there / 2**30:.1f} GiB of memory",
                because="verify runs the model and all ranks in this process",
                try_="fewer layers: --set num_hidden_layers=2 (each layer is proved alike)",
            )
        )


def _memory() -> int | None:
    """Bytes of this machine; None where it does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _data(report: Report) -> dict[str, Any]:
    return {
        "ok": report.ok,
        "model": report.plan.model,
        "tp": report.plan.tp,
        "limit": report.limit,
        "notes": list(report.notes),
        "rows": [vars(row) for row in report.rows],
        "first_wrong": report.first_wrong,
    }
