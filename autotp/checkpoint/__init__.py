"""Loading and saving: a rank reads and writes its own shards, files hold whole tensors."""
