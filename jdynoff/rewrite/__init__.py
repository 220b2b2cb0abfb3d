"""How decisions are made to happen: the step is emitted again with offloads and reloads in it."""
