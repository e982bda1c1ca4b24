"""A model on meta and a checkpoint give each rank what the whole model would have given it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autotp
from autotp.checkpoint.layout import boxes, part_shape, put
from autotp.checkpoint.reading import Files
from tests.checkpoint.families import FAMILIES, SIZES, batch, differences, gpt2, llama, on_meta
from tests.models import WIDTH, mlp, refill, tied_head


def split(model: Any, tp: int, **kwargs: Any) -> Any:
    return autotp.parallelize(model, devices=["cpu"] * tp, **kwargs)


def assert_loads(model: Any, folder: Path, tp: int) -> None:
    """Loading from the folder gives the shards, buffers, loss and gradients of the model."""
    read = split(on_meta(model), tp, checkpoint=folder)
    given = split(model, tp)
    for mine, theirs in zip(read.ranks, given.ranks, strict=True):
        assert differences(mine, theirs) == []
        assert not any(p.is_meta for p in mine.parameters())
    assert len({id(p) for p in read.ranks[0].parameters()}) == len([*model.parameters()])
    losses = [m(**batch()).loss for m in (read, given)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for (name, p), (_, q) in zip(read.named_parameters(), given.named_parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert torch.equal(p.grad, q.grad), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tp", [2, 3])
def test_ranks_read_the_slices_that_they_hold(family: str, tp: int, tmp_path: Path) -> None:
    model = FAMILIES[family]()
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    assert_loads(model, tmp_path, tp)


def test_a_checkpoint_of_many_files_is_read_through_its_index(tmp_path: Path) -> None:
    model: Any = gpt2()
    model.save_pretrained(tmp_path, max_shard_size=20_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    assert_loads(model, tmp_path, 5)
    read = split(on_meta(model), 2, checkpoint=tmp_path / "model.safetensors.index.json")
    assert differences(read.ranks[1], split(model, 2).ranks[1]) == []


@pytest.mark.parametrize("stored, wanted", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_weights_are_converted_to_the_models_dtype(
    stored: str, wanted: str, tmp_path: Path
) -> None:
    one, two = getattr(torch, stored), getattr(torch, wanted)
    model: Any = llama().to(one)
    model.save_pretrained(tmp_path)
    read = split(on_meta(model, two), 2, checkpoint=tmp_path)
    whole = model.to(two)
    for rank, mine in enumerate(read.ranks):
        theirs = split(whole, 2).ranks[rank]
        for name, parameter in mine.named_parameters():
            assert parameter.dtype == two
            assert torch.equal(parameter, theirs.get_parameter(name)), name


def test_a_base_models_checkpoint_is_read_under_its_prefix(tmp_path: Path) -> None:
    model: Any = gpt2()
    model.transformer.save_pretrained(tmp_path)
    assert "wte.weight" in Files(tmp_path).tensors
    assert_loads(model, tmp_path, 2)


def test_a_base_model_is_read_from_a_checkpoint_with_its_prefix(tmp_path: Path) -> None:
    model: Any = gpt2()
    model.save_pretrained(tmp_path)
    assert "transformer.wte.weight" in Files(tmp_path).tensors
    x = {"input_ids": batch()["input_ids"], "use_cache": False}
    base = on_meta(model.transformer)
    read = split(base, 2, checkpoint=tmp_path, example_inputs=x)
    assert differences(read.ranks[1], split(model.transformer, 2, example_inputs=x).ranks[1]) == []


def test_a_checkpoint_with_older_names_is_read(tmp_path: Path) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    model: Any = refill(GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, num_attention_heads=6)))
    model.save_pretrained(tmp_path)
    names = Files(tmp_path).tensors
    assert "embed_out.weight" in names and "lm_head.weight" not in names
    assert_loads(model, tmp_path, 2)


def test_tensors_that_would_have_to_be_joined_are_missing(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**SIZES, num_attention_heads=6, num_key_value_heads=3)
    model: Any = refill(MixtralForCausalLM(config))
    model.save_pretrained(tmp_path / "older")
    text = refusal(model, tmp_path / "older")
    assert "missing: model.layers.0.mlp.experts.gate_up_proj" in text
    assert "save_original_format=False" in text
    model.save_pretrained(tmp_path / "now", save_original_format=False)
    assert_loads(model, tmp_path / "now", 2)
    split(model, 2).save_pretrained(tmp_path / "own")
    again = type(model).from_pretrained(tmp_path / "own")
    assert differences(again, model) == []


def test_any_module_is_read_from_one_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    x = (torch.zeros(2, 5, WIDTH),)
    model = refill(mlp())
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    read = split(mlp().to("meta"), 3, example_inputs=x, checkpoint=tmp_path / "weights.safetensors")
    for rank, mine in enumerate(read.ranks):
        assert differences(mine, split(model, 3, example_inputs=x).ranks[rank]) == []


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_a_tied_tensor_is_read_under_any_of_its_names(name: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = refill(tied_head())
    state = model.state_dict()
    weight = state.pop("embed.weight"), state.pop("head.weight")
    save_file({**state, name: weight[0]}, tmp_path / "model.safetensors")
    x = (torch.zeros(2, 5, dtype=torch.long),)
    with torch.device("meta"):
        meta = tied_head()
    read = split(meta, 2, example_inputs=x, checkpoint=tmp_path).ranks[1]
    assert read.embed.weight is read.head.weight
    assert torch.equal(read.head.weight, weight[0][6:])
    both = {**state, "embed.weight": weight[0], "head.weight": weight[0].clone()}
    save_file(both, tmp_path / "model.safetensors")
    assert differences(split(meta, 2, example_inputs=x, checkpoint=tmp_path).ranks[1], read) == []
    both["head.weight"][6] += 1
    save_file(both, tmp_path / "model.safetensors")
    with pytest.raises(autotp.CheckpointError, match="stored twice, with different values"):
        split(meta, 2, example_inputs=x, checkpoint=tmp_path)


def changed(folder: Path, change: Any) -> None:
    """Rewrite a checkpoint of one file."""
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


def refusal(model: Any, folder: Path, **kwargs: Any) -> str:
    with pytest.raises(autotp.CheckpointError) as caught:
        split(on_meta(model), 2, checkpoint=folder, **kwargs)
    return str(caught.value)


def test_missing_superfluous_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    def change(state: dict[str, torch.Tensor]) -> None:
        del state["transformer.h.0.mlp.c_fc.bias"]
        state["transformer.h.7.extra"] = torch.ones(2)
        state["transformer.wpe.weight"] = torch.ones(3, 48)
        state["transformer.ln_f.bias"] = torch.ones(48, dtype=torch.long)

    model: Any = gpt2()
    model.save_pretrained(tmp_path)
    changed(tmp_path, change)
    text = refusal(model, tmp_path)
    assert text.startswith("the checkpoint does not fit GPT2LMHeadModel\n")
    assert "missing: transformer.h.0.mlp.c_fc.bias" in text
    assert "superfluous: transformer.h.7.extra" in text
    assert "transformer.wpe.weight is [64, 48], transformer.wpe.weight in the file [3, 48]" in text
    assert "transformer.ln_f.bias is torch.float32" in text


def test_a_superfluous_tensor_alone_is_named(tmp_path: Path) -> None:
    model: Any = gpt2()
    model.save_pretrained(tmp_path)
    changed(tmp_path, lambda state: state.update(more=torch.ones(2)))
    assert "values   superfluous: more\n" in refusal(model, tmp_path)


@pytest.mark.parametrize(
    "family, name",
    [
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("gpt2", "transformer.h.0.attn.bias"),
    ],
)
def test_tables_of_older_checkpoints_are_left_out(family: str, name: str, tmp_path: Path) -> None:
    model: Any = FAMILIES[family]()
    model.save_pretrained(tmp_path)
    changed(tmp_path, lambda state: state.update({name: torch.zeros(3)}))
    assert_loads(model, tmp_path, 2)


def test_files_that_are_cut_short_absent_or_mixed_up_are_named(tmp_path: Path) -> None:
    model: Any = gpt2()
    model.save_pretrained(tmp_path, max_shard_size=20_000)
    first, second, *_ = sorted(tmp_path.glob("model-*.safetensors"))
    whole = first.read_bytes()
    first.write_bytes(whole[:-100])
    assert f"{first}\n" in refusal(model, tmp_path)
    first.write_bytes(second.read_bytes())
    text = refusal(model, tmp_path)
    assert "does not hold this tensor" in text and first.name in text
    first.unlink()
    assert "there is no such file" in refusal(model, tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"no": 1}))
    assert "KeyError" in refusal(model, tmp_path)
    index.unlink()
    text = refusal(model, tmp_path)
    assert "neither model.safetensors nor model.safetensors.index.json is there" in text
    assert "does not exist" in refusal(model, tmp_path / "none")


class Table(nn.Module):
    """A plain module with a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)
        self.register_buffer("scale", torch.arange(10.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu() * self.get_buffer("scale"))


def test_a_buffer_without_value_is_named_and_one_with_value_is_kept(tmp_path: Path) -> None:
    from accelerate import init_empty_weights
    from safetensors.torch import save_file

    x = (torch.zeros(2, 5, WIDTH),)
    model = refill(Table())
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(autotp.CheckpointError) as caught:
        split(Table().to("meta"), 2, example_inputs=x, checkpoint=tmp_path)
    assert "the values of buffers are lost\n  values   scale\n" in str(caught.value)
    assert "init_empty_weights(include_buffers=False)" in str(caught.value)
    with init_empty_weights(include_buffers=False):
        empty = Table()
    read = split(empty, 2, example_inputs=x, checkpoint=tmp_path)
    assert differences(read.ranks[1], split(model, 2, example_inputs=x).ranks[1]) == []
    assert torch.equal(read.ranks[1].scale, torch.arange(5.0, 10.0))


class Config:
    """What a configuration is known by."""

    def save_pretrained(self) -> None:
        """Never called here."""


class Drawn(Table):
    """A buffer that nobody can compute again."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("scale", torch.rand(10), persistent=False)


def test_a_buffer_that_was_drawn_at_random_is_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(Drawn(Config()).state_dict(), tmp_path / "model.safetensors")
    x = (torch.zeros(2, 5, WIDTH),)
    with pytest.raises(autotp.CheckpointError, match="drawn at random") as caught:
        split(Drawn(Config()).to("meta"), 2, example_inputs=x, checkpoint=tmp_path)
    assert "\n  values   scale\n" in str(caught.value)


def test_building_buffers_again_draws_no_random_numbers(tmp_path: Path) -> None:
    model: Any = llama()
    model.save_pretrained(tmp_path)
    meta = on_meta(model)
    before = torch.get_rng_state()
    split(meta, 2, checkpoint=tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_boxes_of_a_part_are_put_back_where_they_were() -> None:
    whole = torch.arange(60).view(6, 10)
    ranges = [(((0, 2), (4, 5)), ((1, 4), (7, 8))), (((2, 4), (5, 6)), ((0, 1), (4, 7), (8, 10)))]
    found = torch.full_like(whole, -1)
    for held in ranges:
        part = torch.full(part_shape(held), -2)
        for box in boxes(held):
            part[box.part] = whole[box.whole]
        assert (part >= 0).all()
        put(found, part, held)
    mask = found >= 0
    assert mask.sum() == 3 * 4 + 3 * 6
    assert torch.equal(found[mask], whole[mask])


def test_loading_is_possible_without_transformers(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(refill(mlp()).state_dict(), tmp_path / "model.safetensors")
    code = f"""
import sys, torch, autotp
from torch import nn
from tests.models import mlp
model = mlp().to("meta")
autotp.parallelize(model, devices=["cpu"] * 2, checkpoint={str(tmp_path)!r},
                   example_inputs=(torch.zeros(2, 5, {WIDTH}),))
assert "transformers" not in sys.modules and "accelerate" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
