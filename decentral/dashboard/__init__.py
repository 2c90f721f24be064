"""The page: what a peer's folder says of it and of its swarm, live or replayed, for a browser. Read-only.

Reads ``status.json``, ``events.jsonl`` and ``metrics.jsonl`` as any other program may, so that a running peer, one that
has ended and another process's are one case. Pure: `history`, `view`, `words`. With I/O: `folders`, `live`, `replay`,
`server`. Starlette and uvicorn are an extra; nothing else imports this room but the command line.
"""
