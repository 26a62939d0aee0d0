"""Token by token: one kernel for every matrix-state family."""
