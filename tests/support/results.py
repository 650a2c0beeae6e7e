"""What other tools read of a result."""

RESULT_KEYS = [
    "strategy",
    "workers",
    "seed",
    "steps",
    "samples",
    "loss",
    "accuracy",
    "seconds",
    "startup_seconds",
    "virtual_seconds",
    "bytes_sent",
    "wire_bytes",
    "wait_share",
    "staleness_mean",
    "staleness_max",
    "consensus_distance",
    "trace_hash",
    "lost_workers",
    "joined_workers",
]
