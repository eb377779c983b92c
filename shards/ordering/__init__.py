"""Which packs make which step, in what order.
