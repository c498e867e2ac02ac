"""Which process this is, which ranks are alive, and how they join, stop and fail."""
