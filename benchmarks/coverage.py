"""On which Hugging Face models autotp is exact, and how much of each it splits.

    python benchmarks/coverage.py                       # every type that is not in the results yet
    python benchmarks/coverage.py --only llama t5       # these, anew
    python benchmarks/coverage.py --write               # docs/coverage.md from the results

For every type: a small model with salted weights, `autotp.verify` (outputs and all gradients
against the original's) for 2 and 3 ranks in one process, and what the plan splits. Each model runs
in a process of its own with a time limit. Results are lines of JSON; a type that has one is passed
over.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from coverage_table import table
from rounding import moved
from small_models import configuration_of, example_call, small_model, types
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import autotp
from autotp import pipeline
from autotp.errors import CaptureError, CheckError
from autotp.planning import Plan
from autotp.work import split_share, whole_products
from passes.infer import infer

RANKS = (2, 3)
LIMIT = 1e-5
FACTOR = 4.0  # of the original's own rounding: what is above the limit may be at most this
ROOT = Path(__file__).resolve().parent.parent


def _captured_once(capture: Any) -> Any:
    """A process measures one call of one model: it is captured once for all numbers of ranks."""
    found: list[Any] = []

    def once(*args: Any, **kwargs: Any) -> Any:
        if not found:
            found.append(capture(*args, **kwargs))
        return found[0]

    return once


def measure(kind: str) -> dict[str, Any]:
    """The record of one type: how far it came, and what came out."""
    record: dict[str, Any] = {"type": kind, "stage": "configuration"}
    record["tp_plan"] = bool(getattr(configuration_of(kind), "base_model_tp_plan", None))
    try:
        model = small_model(kind).eval()
        record["class"] = type(model).__name__
        call = example_call(model)
        record["stage"] = "original"
        with torch.no_grad():
            model(**call)
        dtype = _widest(model, call)
        record["dtype"] = str(dtype).removeprefix("torch.")
        for tp in RANKS:
            record["stage"] = f"tp={tp}"
            record[f"tp{tp}"] = _verified(model, call, tp, dtype)
        record["stage"] = "done"
    except Exception as error:
        record["error"] = f"{type(error).__name__}: {error}"[:2000]
        record["trace"] = traceback.format_exc()[-3000:]
        if isinstance(error, CaptureError):
            record["stage"] = "capture"
        elif isinstance(error, CheckError):
            record["stage"] = f"check at {record['stage']}"
    return record


def _widest(model: nn.Module, call: dict[str, Any]) -> torch.dtype:
    """float64 where the model runs in it: errors of rounding do not hide errors of meaning."""
    import copy

    wide = {k: v.double() if _floating(v) else v for k, v in call.items()}
    try:
        with torch.no_grad():
            copy.deepcopy(model).double()(**wide)
    except Exception:  # any failure means the same
        return torch.float32
    call.update(wide)
    return torch.float64


def _floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _verified(
    model: nn.Module, call: dict[str, Any], tp: int, dtype: torch.dtype
) -> dict[str, Any]:
    begun = time.process_time()
    report = autotp.verify(model, tp, example_inputs=call, dtype=dtype, limit=LIMIT)
    plan, worst = report.plan, max(report.rows, key=lambda row: row.error)
    rounding = 0.0 if report.ok else _rounding(report, moved(model, call, dtype))
    exact = report.ok or rounding > 0.0
    return {
        "ok": exact,
        "worst": worst.error,
        "rounding": rounding,
        "where": "" if exact else f"{worst.name}; first wrong: {report.first_wrong}",
        "gradients": sum(row.what == "gradient" for row in report.rows),
        "seconds": round(time.process_time() - begun, 1),
        "forward": plan.collectives.forward,
        "backward": plan.collectives.backward,
        "gathers": plan.collectives.gathers,
        **_split(plan),
    }


def _rounding(report: autotp.Report, moves: dict[str, float]) -> float:
    """How far rounding moves what is above the limit; 0 unless that explains all of it."""
    above = [row for row in report.rows if not row.ok]
    explained = all(row.error <= FACTOR * moves.get(row.name, 0.0) for row in above)
    return min(moves[row.name] for row in above) if explained else 0.0


def _split(plan: Plan) -> dict[str, Any]:
    """The shares of parameters that lie in parts, and the reasons for the others."""
    program = plan.stages[0][1]
    inferred = infer(program)
    gemms = {program.parameter(u.operand) for u in inferred.uses if u.kind == "gemm"} - {None}
    sizes = {t.name: torch.Size(t.shape).numel() for t in plan.tensors if t.kind == "parameter"}
    split = {name for name in sizes if plan.is_sharded(name)}
    used = {k.name for k in plan.kept if k.reason == "the captured call does not use it"}
    whole = {n: s for n, s in sizes.items() if n not in used}
    kept = [
        {
            "name": k.name,
            "size": sizes[k.name],
            "gemm": k.name in gemms,
            "reason": k.reason,
            "node": k.node,
            "source": k.source,
        }
        for k in plan.kept
        if k.name not in used and len(plan.by_name[k.name].shape) > 1
    ]
    return {
        "work": split_share(plan),
        "whole": whole_products(plan),
        "gemm_share": _share(split & gemms, {n: s for n, s in sizes.items() if n in gemms}),
        "share": _share(split & set(whole), whole),
        "axes": [[a.name, a.kind, a.units] for a in plan.axes],
        "kept": kept,
        "no_rule": inferred.no_rule,
    }


def _share(names: set[str], sizes: dict[str, int]) -> float:
    total = sum(sizes.values())
    return round(sum(sizes[name] for name in names) / total, 4) if total else 0.0


def _child(kind: str, results: Connection) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pipeline.capture = _captured_once(pipeline.capture)
    results.send(measure(kind))


def run(kind: str, limit: float) -> dict[str, Any]:
    """`measure` in a process of its own, which is ended after `limit` seconds."""
    context = multiprocessing.get_context("fork")  # torch and transformers are imported once
    mine, its = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(kind, its))
    process.start()
    its.close()
    begun = time.time()
    record: dict[str, Any] = {"type": kind, "stage": "time", "error": f"no result in {limit:g} s"}
    try:
        if mine.poll(limit):
            record = mine.recv()
    except EOFError:
        process.join()
        record = {"type": kind, "stage": "crash", "error": f"exit code {process.exitcode}"}
    process.kill()
    process.join()
    return {**record, "wall": round(time.time() - begun, 1)}


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Results by type; of several of one type the last counts."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {record["type"]: record for record in map(json.loads, lines)}


def line(record: dict[str, Any]) -> str:
    """One line for the terminal."""
    parts = [f"{record['type']:<24} {record['stage']:<14}"]
    for tp in RANKS:
        if found := record.get(f"tp{tp}"):
            word = "ok" if found["ok"] else "WRONG"
            parts.append(f"tp={tp} {word} {found['worst']:.0e} work {found['work']:.1%}")
    parts.append(record.get("error", "").replace("\n", " | ")[:220])
    return "  ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--limit", type=int, help="at most so many types")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=240.0, help="time limit of one model")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "coverage.jsonl")
    parser.add_argument("--write", action="store_true", help="write docs/coverage.md")
    given = parser.parse_args()
    given.results.parent.mkdir(parents=True, exist_ok=True)
    done = read(given.results)
    wanted = given.only or [kind for kind in types() if kind not in done]
    wanted = [] if given.write and not given.only else wanted[: given.limit]
    with ThreadPoolExecutor(given.jobs) as pool, given.results.open("a") as out:
        for record in pool.map(lambda kind: run(kind, given.seconds), wanted):
            out.write(json.dumps(record) + "\n")
            out.flush()
            print(line(record), flush=True)
    if given.write:
        path = ROOT / "docs" / "coverage.md"
        path.write_text(
            table(read(given.results), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
