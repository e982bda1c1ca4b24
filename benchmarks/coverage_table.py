"""The coverage table as Markdown, from the records of `coverage.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

_HEAD = """# Coverage

Made by `python benchmarks/coverage.py --write`; do not edit. Each row is a small model of a Hugging
Face type (transformers {version}) with all its structural features kept and salted weights.
`exact` compares outputs and every parameter's gradient with the original's, one process holding all
ranks. `split` is the share of the weights of matrix products, and of all parameters, that lies in
parts. A type without numbers could not be tried; the last table says why.

"""


def table(records: Mapping[str, dict[str, Any]]) -> str:
    """All of docs/coverage.md."""
    import transformers

    done = {name: r for name, r in sorted(records.items()) if r["stage"] == "done"}
    others = {name: r for name, r in sorted(records.items()) if r["stage"] != "done"}
    text = _HEAD.format(version=transformers.__version__) + _totals(records, done)
    text += "\n## Types that ran\n\n"
    text += "| type | class | exact at tp=2 | exact at tp=3 | GEMMs split | parameters split |"
    text += " whole GEMM weights, and why |\n|---|---|---|---|---|---|---|\n"
    text += "".join(_row(name, r) for name, r in done.items())
    text += "\n## Types that did not run\n\n| type | at | why |\n|---|---|---|\n"
    text += "".join(f"| {name} | {r['stage']} | {_cell(_why(r))} |\n" for name, r in others.items())
    return text + _rules(done)


def _totals(records: Mapping[str, Any], done: Mapping[str, Any]) -> str:
    stages = Counter(r["stage"].split(" ")[0] for r in records.values())
    exact = [r for r in done.values() if r["tp2"]["ok"] and r["tp3"]["ok"]]
    most = [r for r in exact if r["tp2"]["gemm_share"] >= 0.95]
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
        ("of these with 95 % of GEMM weights split at tp=2", len(most)),
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
        f"{two['gemm_share']:.0%}",
        f"{two['share']:.0%}",
        _cell(why),
    )
    return f"| {' | '.join(cells)} |\n"


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
