"""What the checker knows: how values lie on the ranks, and how each operator carries that along.

Nothing here is used by the passes that rewrite graphs, and nothing of theirs is used here.
"""
