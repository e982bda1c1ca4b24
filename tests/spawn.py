"""Run a function on several real ranks: one process each, gloo over loopback, with a deadline.

    results = run(function, 2, *args)   # function(rank, world, *args) on each; results by rank

The processes see what torchrun would give them: the environment, and a store that the parent holds.
A rank that raises, dies or does not end in time fails the run, with every rank's output in the
message; nothing is left running. The function must be at the top level of its file. The file is
loaded by path and under the name that it has here, as pytest's importlib mode names test modules in
a way that a new process could not import.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GRACE = 5.0  # seconds for the peers of a rank that has failed


class SpawnError(AssertionError):
    """A rank failed or hung."""


def run(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 120.0,
    start: bool = True,
) -> list[Any]:
    """What `function(rank, world, *args)` returns on each of `world` ranks.

    With `start=False` the function finds the environment of torchrun but no process group.
    """
    from torch._C._distributed_c10d import TCPStore

    assert "AUTOTP_SPAWNED" not in os.environ, "a spawned rank must not spawn ranks"
    # The port is never free between its choice and its use: the store itself picks it.
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="autotp-spawn-") as name:
        folder = Path(name)
        file = function.__code__.co_filename
        job = (os.path.abspath(file), function.__module__, function.__name__, start)
        (folder / "job").write_bytes(pickle.dumps(job))
        (folder / "args").write_bytes(pickle.dumps(args))
        processes = [_start(folder, rank, world, store.port) for rank in range(world)]
        try:
            why = _wait(processes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if why:
            logs = [f"--- rank {r}\n{_read(folder / f'log{r}')}" for r in range(world)]
            where = f"{function.__name__} on {world} ranks"
            raise SpawnError("\n".join([f"{where}: {why}", *logs]))
        return [pickle.loads((folder / f"result{r}").read_bytes()) for r in range(world)]


def _start(folder: Path, rank: int, world: int, port: int) -> subprocess.Popen[bytes]:
    env = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # as under torchrun, no rank holds the store
        "OMP_NUM_THREADS": "1",
        "AUTOTP_SPAWNED": "1",
    }
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with open(folder / f"log{rank}", "wb") as log:
        command = [sys.executable, __file__, str(folder), str(rank), str(world)]
        return subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> str:
    """Wait for all; returns what went wrong, or nothing."""
    failed: list[int] = []
    while True:
        codes = [process.poll() for process in processes]
        if any(codes) and not failed:
            failed = [rank for rank, code in enumerate(codes) if code]
            deadline = min(deadline, time.monotonic() + GRACE)
        if None not in codes or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    hung = [rank for rank, code in enumerate(codes) if code is None]
    for rank in hung:
        processes[rank].send_signal(signal.SIGUSR1)
    time.sleep(0.5 if hung else 0)
    if failed:
        return f"failed first: {failed}; still running when killed: {hung}"
    return f"out of time: {hung}" if hung else ""


def _read(path: Path) -> str:
    return path.read_text(errors="replace").strip()


def _child(folder: Path, rank: int, world: int) -> None:
    import torch
    import torch.distributed as dist

    file, module_name, name, start = pickle.loads((folder / "job").read_bytes())
    faulthandler.register(signal.SIGUSR1)  # shows where it hangs
    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(1)
    # A script runs under another name than __main__, or it would spawn again.
    own_name = "__mp_main__" if module_name == "__main__" else module_name
    spec = importlib.util.spec_from_file_location(own_name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[own_name] = sys.modules[module_name] = module  # pickles name it
    spec.loader.exec_module(module)
    args = pickle.loads((folder / "args").read_bytes())
    if start:
        dist.init_process_group("gloo")
    result = getattr(module, name)(rank, world, *args)
    (folder / f"part{rank}").write_bytes(pickle.dumps(result))
    (folder / f"part{rank}").rename(folder / f"result{rank}")
    if dist.is_initialized():
        dist.barrier()  # gloo's connections must not close under a slower peer
        dist.destroy_process_group()


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # not tests/: its folders are named like packages
    try:
        _child(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # No tidying up: peers of a failed rank may hold it, and threads that still run may end it with
    # "terminate called without an active exception".
    os._exit(code)
