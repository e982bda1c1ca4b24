"""What a training step of a plan needs on machines that one does not have: memory, messages,
time."""
