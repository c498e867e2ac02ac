"""AdamW on shards, and the formats and memory of its state."""
