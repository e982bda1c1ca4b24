"""All that a transformed model needs when it runs: the group, f and g, random streams, shards."""
