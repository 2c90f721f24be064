"""The page: what a peer's folder says of it and of its swarm, live or replayed, for a browser. Read-only.

Reads ``status.json``, ``events.jsonl`` and ``metrics.jsonl`` as any other program may, so that a running peer, one that
has ended and another process's are one case. Pure: `history`, `view`. With I/O: `live`, `server`. Starlette and uvicorn
are an extra; nothing imports `server` but the command line.
"""
