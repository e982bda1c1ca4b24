from __future__ import annotations
import torch
from torch.autograd import Function
def take(x, dim, held):
    parts=[x.narrow(dim,a,b-a) for a,b in held]
    return parts[0] if len(parts)==1 else torch.cat(parts,dim)
def place(parts, dim, ranges):
    n=sum(b-a for h in ranges for a,b in h)
    shape=list(parts[0].shape); shape[dim]=n
    out=parts[0].new_empty(shape)
    for p,h in zip(parts,ranges):
        off=0
        for a,b in h:
            out.narrow(dim,a,b-a).copy_(p.narrow(dim,off,b-a)); off+=b-a
    return out
def copy_to_region(x, group): raise NotImplementedError
def reduce_from_region(x, group): raise NotImplementedError
def gather_from_region(x, dim, ranges, group): raise NotImplementedError
def scatter_to_region(x, dim, ranges, group): raise NotImplementedError
