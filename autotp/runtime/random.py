def draw(op, stream, seed, index, *args, group, **kwargs): return op(*args, **kwargs)
def next_seed(group): return group.next_seed()
