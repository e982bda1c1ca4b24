"""The coverage table as Markdown, from the records of `coverage.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

_HEAD = """# Coverage

Made by `python benchmarks/coverage.py --write`; do not edit. Each row is a small model of a Hugging
Face type (transformers {version}) with all its structural features kept and salted weights.
`exact` compares outputs and every parameter's gradient with the original's, one process holding all
ranks. `work split` is the share of the multiplications in matrix products, attention included and
routers not, that no rank repeats (the smaller of those at tp=2 and tp=3; a size that is not fixed
counts as 8); `parameters split` is the share that lies in parts. `tp_plan` says whether
transformers has a plan of its own for the type. A type without numbers could not be tried; the last
table says why.

"""


def table(records: Mapping[str, dict[str, Any]]) -> str:
    """All of docs/coverage.md."""
    import transformers

    done = {name: r for name, r in sorted(records.items()) if r["stage"] == "done"}
    others = {name: r for name, r in sorted(records.items()) if r["stage"] != "done"}
    text = _HEAD.format(version=transformers.__version__) + _totals(records, done)
    text += "\n## Types that ran\n\n"
    text += (
        "| type | class | exact at tp=2 | exact at tp=3 | work split | parameters split | tp_plan |"
    )
    text += " whole GEMM weights, and why |\n|---|---|---|---|---|---|---|---|\n"
    text += "".join(_row(name, r) for name, r in done.items())
    text += "\n## Types that did not run\n\n| type | at | why |\n|---|---|---|\n"
    text += "".join(f"| {name} | {r['stage']} | {_cell(_why(r))} |\n" for name, r in others.items())
    return text + _rules(done)


def _totals(records: Mapping[str, Any], done: Mapping[str, Any]) -> str:
    stages = Counter(r["stage"].split(" ")[0] for r in records.values())
    exact = [r for r in done.values() if r["tp2"]["ok"] and r["tp3"]["ok"]]
    most = [r for r in exact if _work(r) >= 0.95]
    rows = [
        ("types tried", len(records)),
        (
            "no small configuration could be made or run",
            stages["configuration"] + stages["original"],
        ),
        ("refused by `torch.export`", stages["capture"]),
        (
            "no result (error or time)",
            sum(stages.values())
            - len(done)
            - stages["configuration"]
            - stages["original"]
            - stages["capture"],
        ),
        ("ran", len(done)),
        ("exact at tp=2 and tp=3", len(exact)),
        ("of these with 95 % of the work split", len(most)),
        (
            "of those that ran, with a tp_plan in transformers",
            sum(r["tp_plan"] for r in done.values()),
        ),
        ("wrong", len(done) - len(exact)),
    ]
    return "| | number |\n|---|---|\n" + "".join(f"| {what} | {n} |\n" for what, n in rows)


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


def _work(record: Mapping[str, Any]) -> float:
    return min(record[f"tp{tp}"]["work"] for tp in (2, 3))


def _exact(found: Mapping[str, Any]) -> str:
    return f"{found['worst']:.0e}" if found["ok"] else f"**wrong** {found['worst']:.0e}"


def _pattern(name: str) -> str:
    return "`" + ".".join("*" if part.isdigit() else part for part in name.split(".")) + "`"


def _why(record: Mapping[str, Any]) -> str:
    """The message, and for a refusal its line on the cause."""
    lines = [line.strip() for line in str(record.get("error", "")).splitlines() if line.strip()]
    values = [line for line in lines[1:3] if line.startswith(("values", "because"))]
    return "; ".join([*lines[:1], *values])[:300]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _rules(done: Mapping[str, Any]) -> str:
    """Operators without a rule, by how many types contain them."""
    types: Counter[str] = Counter(op for r in done.values() for op in r["tp2"]["no_rule"])
    text = "\n## Operators without a rule\n\nWhat they touch stays whole.\n\n"
    text += "| operator | types |\n|---|---|\n"
    return text + "".join(f"| `{op}` | {n} |\n" for op, n in types.most_common())
