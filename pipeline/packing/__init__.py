"""From segment lengths to packs: cutting, packers, rows."""
