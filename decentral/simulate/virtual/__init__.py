"""An event loop without a wire: tasks, scopes and locks of anyio under a clock that jumps."""
