"""The coverage table as Markdown, from the records of `coverage.py`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

_HEAD = """# Coverage

Made by `python benchmarks/coverage.py --write`; do not edit. Each row is a small model of a Hugging
Face type (transformers {version}) with all its structural features kept and salted weights.
`exact` compares outputs and every parameter's gradient with the original's, one process holding all
ranks: the largest error, relative to the largest value of each tensor, is at most 1e-5. Where it is
more, the original's own rounding is measured and given: how far the same gradient moves when the
parameters are moved by half a unit in float32's last place; at most 4 times that is exact too.
`work split` is the share of the multiplications in matrix products, attention included and
routers not, that no rank repeats (the smaller of those at tp=2 and tp=3; a size that is not fixed
counts as 8); `parameters split` is the share that lies in parts. `tp_plan` says whether
transformers has a plan of its own for the type. A type without numbers could not be tried; the last
table says why.

"""


def table(records: Mapping[str, dict[str, Any]], causal: Collection[str]) -> str:
    """All of docs/coverage.md; `causal` are the types of causal language models."""
    import transformers

    done = {name: r for name, r in sorted(records.items()) if r["stage"] == "done"}
    others = {name: r for name, r in sorted(records.items()) if r["stage"] != "done"}
    text = _HEAD.format(version=transformers.__version__) + _totals(records, causal)
    text += "\n## Types that ran\n\n"
    text += (
        "| type | class | exact at tp=2 | exact at tp=3 | work split | parameters split | tp_plan |"
    )
    text += " whole GEMM weights, and why |\n|---|---|---|---|---|---|---|---|\n"
    text += "".join(_row(name, r) for name, r in done.items())
    text += (
        "\n## Types with less than 95 % of the work split\n\nProducts that every rank repeats.\n\n"
    )
    text += "| type | split | repeated |\n|---|---|---|\n"
    text += "".join(_low(name, r) for name, r in done.items() if _work(r) < 0.95)
    text += "\n## Types that did not run\n\n| type | at | why |\n|---|---|---|\n"
    text += "".join(f"| {name} | {r['stage']} | {_cell(_why(r))} |\n" for name, r in others.items())
    return text + _rules(done)


def _totals(records: Mapping[str, dict[str, Any]], causal: Collection[str]) -> str:
    counts = [_counts(records), _counts({k: r for k, r in records.items() if k in causal})]
    rows = (f"| {what} | {n} | {counts[1][what]} |\n" for what, n in counts[0].items())
    return "| | all | causal language models |\n|---|---|---|\n" + "".join(rows)


def _counts(records: Mapping[str, dict[str, Any]]) -> dict[str, int]:
    done = [r for r in records.values() if r["stage"] == "done"]
    stages = Counter(r["stage"].split(" ")[0] for r in records.values())
    exact = [r for r in done if r["tp2"]["ok"] and r["tp3"]["ok"]]
    small = stages["configuration"] + stages["original"]
    return {
        "types tried": len(records),
        "transformers has a tp_plan": sum(r["tp_plan"] for r in records.values()),
        "no small configuration could be made or run": small,
        "refused by `torch.export`": stages["capture"],
        "no result (error or time)": len(records) - len(done) - small - stages["capture"],
        "ran": len(done),
        "exact at tp=2 and tp=3": len(exact),
        "wrong": len(done) - len(exact),
        "exact, and 95 % of the work split": sum(_work(r) >= 0.95 for r in exact),
    }


def _row(name: str, record: Mapping[str, Any]) -> str:
    two, three = record["tp2"], record["tp3"]
    reasons: dict[str, list[str]] = {}
    for kept in two["kept"]:
        if kept["gemm"]:
            reasons.setdefault(kept["reason"], []).append(kept["name"])
    why = "; ".join(f"{_pattern(names[0])}: {reason}" for reason, names in reasons.items())
    cells = (
        name,
        f"`{record['class']}`",
        _exact(two),
        _exact(three),
        f"{_work(record):.1%}",
        f"{two['share']:.0%}",
        "yes" if record["tp_plan"] else "",
        _cell(why),
    )
    return f"| {' | '.join(cells)} |\n"


def _low(name: str, record: Mapping[str, Any]) -> str:
    worst = min((record["tp2"], record["tp3"]), key=lambda found: float(found["work"]))
    return f"| {name} | {worst['work']:.1%} | {_cell('; '.join(worst['whole']))} |\n"


def _work(record: Mapping[str, Any]) -> float:
    return min(record[f"tp{tp}"]["work"] for tp in (2, 3))


def _exact(found: Mapping[str, Any]) -> str:
    if not found["ok"]:
        return f"**wrong** {found['worst']:.0e}"
    rounding = found.get("rounding")
    return f"{found['worst']:.0e}" + (f" (rounding {rounding:.0e})" if rounding else "")


def _pattern(name: str) -> str:
    return "`" + ".".join("*" if part.isdigit() else part for part in name.split(".")) + "`"


def _why(record: Mapping[str, Any]) -> str:
    """The message, and for a refusal its line on the cause."""
    lines = [line.strip() for line in str(record.get("error", "")).splitlines() if line.strip()]
    said = [line for line in lines[1:3] if not line.startswith("try")]
    text = "; ".join([*lines[:1], *said])
    return re.sub(r"\S*/site-packages/", "", text)[:300]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _rules(done: Mapping[str, Any]) -> str:
    """Operators without a rule, by how many types contain them."""
    types: Counter[str] = Counter(op for r in done.values() for op in r["tp2"]["no_rule"])
    text = "\n## Operators without a rule\n\nWhat they touch stays whole.\n\n"
    text += "| operator | types |\n|---|---|\n"
    return text + "".join(f"| `{op}` | {n} |\n" for op, n in types.most_common())
