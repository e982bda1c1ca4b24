"""The arguments of every command. Nothing heavy is imported until a command runs."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable

from autotp import __version__

_MODEL = """\
a model is one of
  path/to/directory      with a config.json (Hugging Face)
  path/to/config.json    a configuration file; also --config FILE
  module:function        that returns a model, or (model, example inputs); also file.py:function
  llama                  a type of transformers, with the configuration that it has by itself
  owner/name             a name that transformers resolves (its cache, or the network)
"""
_CODES = """\
exit codes: 0 done; 1 the answer is no (verify found a difference, nothing fits); 2 wrong arguments
or files; 3 the model cannot be captured or planned; 130 interrupted
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    root = argparse.ArgumentParser(
        "autotp",
        description="Tensor parallelism for unmodified PyTorch models: look before you run.",
        epilog=_MODEL + "\n" + _CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("--version", action="version", version=f"autotp {__version__}")
    commands = root.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _plan(commands)
    _graph(commands)
    _verify(commands)
    _estimate(commands)
    _coverage(commands)
    return root


def _plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    made = _command(commands, "plan", "what is split over the ranks, how, and why the rest is not")
    _tp(made)
    made.add_argument("--save", metavar="FILE", help="write the plan as JSON for autotp.plan")
    made.add_argument("--dump", metavar="DIR", help="write the plan and the graph of every stage")
    made.add_argument("--plan", metavar="FILE", help="show a saved plan; MODEL is not needed")
    made.add_argument(
        "--explain",
        action="append",
        metavar="NAME",
        help="why this parameter is split as it is, or what barred it; repeatable",
    )


def _graph(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    made = _command(commands, "graph", "the graph before and after, with f, g and placements")
    _tp(made)
    made.add_argument("--module", default="", metavar="PATH", help="one module: transformer.h.3")
    made.add_argument(
        "--view", default="after", metavar="VIEW", help="before, after (default), or a rank: 7"
    )
    made.add_argument(
        "--diff",
        nargs=2,
        metavar=("ONE", "OTHER"),
        help="two views or [MODULE@]VIEW: `before after`, `0 7`, `h.0@after h.1@after`",
    )
    made.add_argument(
        "--format",
        choices=["text", "dot", "svg", "graphml", "html"],
        help="default: by the name of --output, else text; html is one page of the whole model",
    )
    made.add_argument("--output", metavar="FILE", help="write there instead of printing")


def _verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    made = _command(
        commands, "verify", "outputs and every gradient of all ranks against the model, on this CPU"
    )
    _tp(made)
    made.add_argument("--seed", type=_seed, default=0, help="of the random weights (default 0)")
    made.add_argument("--no-backward", action="store_true", help="compare outputs only")
    made.add_argument("--dtype", help="convert the model first: float64, bfloat16, ...")
    made.add_argument(
        "--limit", type=_positive_number, help="largest relative error (default 1e-5)"
    )
    made.add_argument("--weights", action="store_true", help="read the directory's weights too")


def _estimate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    made = _command(
        commands, "estimate", "memory, messages and time of a training step on a described machine"
    )
    _tp(made)
    made.add_argument(
        "--fit", action="store_true", help="the smallest tp of 1, 2, 4, ... that fits; --tp: most"
    )
    made.add_argument("--every", action="store_true", help="with --fit, try every number of ranks")
    made.add_argument("--machine", choices=["v100", "a100", "h100", "h200"], default="h100")
    made.add_argument("--precision", choices=["mixed", "float32", "half"], default="mixed")
    made.add_argument(
        "--checkpointing", action="store_true", help="count with layers computed again"
    )
    made.add_argument("--batch", type=_count, help="default 8 where the model shows no call")
    made.add_argument("--seq", type=_count, help="default 1024 where the model shows no call")
    made.add_argument("--memory", type=_positive_number, metavar="GIB", help="of one device")
    made.add_argument(
        "--flops-share", type=_positive_number, help="of the peak that products reach"
    )
    made.add_argument("--link-share", type=_positive_number, help="of the links' bandwidth")


def _coverage(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    made = _command(
        commands, "coverage", "of several models: captured or not, and how much is split", many=True
    )
    _tp(made)


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    about: str,
    many: bool = False,
) -> argparse.ArgumentParser:
    made = commands.add_parser(
        name,
        help=about,
        description=about,
        epilog=_MODEL + "\n" + _CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if many:
        made.add_argument("models", nargs="+", metavar="MODEL", help="see below")
    else:
        made.add_argument("model", nargs="?", metavar="MODEL", help="see below")
        made.add_argument("--config", metavar="FILE", help="a configuration file (JSON)")
    made.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a value of the configuration, or pass it to the function; repeatable",
    )
    made.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="[NAME=]SHAPE[:DTYPE]",
        help="an example input, `2,16,64` or `input_ids=2,16:int64`; repeatable",
    )
    made.add_argument("--eval", action="store_true", help="in evaluation mode: no dropout")
    made.add_argument("--json", action="store_true", help="print JSON")
    made.add_argument("--quiet", action="store_true", help="no progress on standard error")
    made.set_defaults(run=_runner(name))
    return made


def _runner(name: str) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        found: int = importlib.import_module(f"autotp.commands.{name}").run(arguments)
        return found

    return run


def _tp(made: argparse.ArgumentParser) -> None:
    made.add_argument("--tp", type=_count, metavar="N", help="number of ranks")
    made.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="norms, dropout and residuals outside of regions on slices of the sequence",
    )


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks (1, 2, ...)")
    return int(text)


def _positive_number(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 1e-100 <= found <= 1e15:  # so that what is computed with it stays finite
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number from 1e-100 to 1e15")
    return found


def _seed(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a seed (0, 1, ...; 18 digits)")
    return int(text)
