"""Fine-tune a small GPT-2 with the Trainer of transformers, over processes that share the model.

    python examples/trainer.py                # 2 processes share the model
    python examples/trainer.py --tp 2 --dp 2  # two such pairs, half of each batch each
    python examples/trainer.py --resume       # from the last checkpoint

The text is the Zen of Python and this file. What is saved at the end is an ordinary checkpoint,
which is loaded again and continues a line.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import autotp
from autotp.trainer import Trainer

CONTEXT = 64


def rows() -> list[dict[str, torch.Tensor]]:
    """Sequences of bytes."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    text = codecs.decode(this.s, "rot13") + Path(__file__).read_text()
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    return [{"input_ids": x, "labels": x} for x in data.unfold(0, CONTEXT, CONTEXT // 2)]


def train(options: argparse.Namespace) -> None:
    """One process's part."""
    torch.manual_seed(0)  # the same weights on every rank
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": CONTEXT, "vocab_size": 256}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    arguments = TrainingArguments(
        output_dir=str(options.out),
        per_device_train_batch_size=8 // options.dp,
        max_steps=options.steps,
        save_steps=options.steps // 3,
        logging_steps=options.steps // 6,
        learning_rate=3e-3,
        report_to=[],
        use_cpu=torch.cuda.device_count() < options.tp * options.dp,
    )
    trainer = Trainer(autotp.parallelize(model, tp=options.tp), arguments, train_dataset=rows())
    trainer.train(resume_from_checkpoint=options.resume or None)
    trainer.save_model(str(options.out / "final"))
    x = torch.stack([row["input_ids"] for row in rows()[:8]]).to(trainer.model.device)
    loss = trainer.model.eval()(input_ids=x, labels=x).loss
    if dist.get_rank() == 0:
        whole = GPT2LMHeadModel.from_pretrained(options.out / "final").to(x.device).eval()
        again = whole(input_ids=x, labels=x).loss
        print(f"loss {loss:.6f}, of the checkpoint that from_pretrained loads {again:.6f}")


def main() -> int:
    """Start the processes, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=2, help="processes that share a model")
    parser.add_argument("--dp", type=int, default=1, help="models that share a batch")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--out", type=Path, default=Path("trainer"), help="what is written")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        world = options.tp * options.dp
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        threads = str(max(1, (os.cpu_count() or 1) // world))
        command = [*launch, f"--nproc-per-node={world}", *sys.argv]
        return subprocess.call(command, env={"OMP_NUM_THREADS": threads, **os.environ})
    train(options)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
