"""Key groups as columns: how rows travel, how a group's devices are kept, and the fold over them."""
