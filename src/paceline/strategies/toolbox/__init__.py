"""What methods are built from: guards, topologies, the optimizer of a shard."""
