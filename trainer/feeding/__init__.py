"""From pack ids to micro-batches: packs as they are stored or drawn anew, prepared ahead."""
